"""Defines what a frontend gives to the step driver: operations of its framework, and its part of error texts."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from gradcomp.engine import Listener
from gradcomp.pipeline.digests import Digests
from gradcomp.pipeline.fingerprint import SoonFingerprint


@dataclass(frozen=True)
class Words:
    """Holds the parts of error texts in which frontends differ.

    ``step_is_open`` says why the state can be neither read nor replaced in the middle of a step. The others are advice
    that is appended to an error: ``late_gradient`` where a gradient arrived after its step was flushed,
    ``unequal_steps`` where some ranks applied the means and others did not.
    """

    step_is_open: str
    late_gradient: str = ""
    unequal_steps: str = ""


class Adapter(Protocol):
    """Gives the step driver what only the framework can do."""

    @property
    def listener(self) -> Listener | None:
        """Return the listener that is told of means before the step ends, or None."""
        ...

    @property
    def words(self) -> Words: ...

    def allocate(self, layer: int) -> int:
        """Return the address of memory for the mean of a layer that this rank has no gradient of.

        Runs on the engine's thread.
        """
        ...

    def digests(self) -> Digests: ...

    def begin_digests(self) -> Future[Digests]:
        """Start to compute the digests while training goes on; no parameter changes before the step is done."""
        ...

    def fingerprint(self, turn: int) -> SoonFingerprint:
        """Return a fingerprint of parameters and optimizer at the start of a step; ``turn`` selects the sample."""
        ...

    def means_complete(self) -> None:
        """Check or use the means, which are now in the outputs. It raises and calls collectives on all ranks alike."""
        ...

    def finalise(self) -> bool:
        """End a step that needs nothing more from the user. Return False if gradients are pending that no step took."""
        ...
