"""What a frontend does for the driver of its steps, and what its users are told."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from gradcomp.engine import Listener
from gradcomp.pipeline.digests import Digests
from gradcomp.pipeline.fingerprint import SoonFingerprint


@dataclass(frozen=True)
class Words:
    """What a frontend's users are told in its own terms.

    ``step_is_open``: why the state can be neither read nor replaced in the midst of a step. The others follow an error
    as advice: ``late_gradient`` where a gradient came after its step was flushed, ``unequal_steps`` where some ranks
    applied the means and others did not.
    """

    step_is_open: str
    late_gradient: str = ""
    unequal_steps: str = ""


class Adapter(Protocol):
    """What a frontend does for the driver of its steps."""

    @property
    def listener(self) -> Listener | None:
        """Who hears of means before the step ends."""
        ...

    @property
    def words(self) -> Words:
        """For its users."""
        ...

    def allocate(self, layer: int) -> int:
        """Memory for the mean of a layer that only other ranks had; on the engine's thread."""
        ...

    def digests(self) -> Digests:
        """Of what the parameters hold."""
        ...

    def begin_digests(self) -> Future[Digests]:
        """The same, where training goes on meanwhile: the parameters stay as they are until the step is done."""
        ...

    def fingerprint(self, turn: int) -> SoonFingerprint:
        """Of the parameters and the optimizer as they are now, for the exchange that opens: a sample by ``turn``."""
        ...

    def means_complete(self) -> None:
        """The means are in the outputs. May raise, and may use collectives: then all ranks do so alike."""
        ...

    def finalise(self) -> bool:
        """End a step that needs nothing more from the user. False if gradients wait that no step has."""
        ...
