"""Controllers that decide now and then, from gradients since the last time."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field

import numpy as np

from gradcomp.control.base import Controller, ControllerRun, Doubles, Environment
from gradcomp.control.candidates import CandidateLevels, Candidates, make_candidates
from gradcomp.control.checks import check_count
from gradcomp.control.observations import Decision, PeriodObservations
from gradcomp.control.periodic_run import PeriodicRun
from gradcomp.core.errors import ConfigError


@dataclass(frozen=True)
class Periodic(Controller):
    """Base of the controllers that decide every ``every_steps`` steps, from the gradients of the period.

    Each layer is looked after by one rank, which gathers its own gradients of the layer, before compression, and
    measures them on a background thread. Tables are added over ranks, so that all see the same; rank 0 decides, also in
    the background, and shares its choice. Each of the two comes in the first step that finds it ready everywhere: no
    step waits. With the setting ``deterministic`` each comes :attr:`lag` steps after it began, and that step waits for
    ranks that are not ready.

    ``window``: gradients add up, without feedback, over the last so many steps of the period; by default all of them.
    ``samples``: instead, so many single steps, spread over the period, are measured one by one; norms, those of errors
    too, are root mean squares over them. A layer whose choices are all of low rank is then measured with its residual.

    Wire: twice a period one sum of a table of float64 over ranks, the first with the learning rate. State: 8 bytes per
    element of the model, divided over the ranks, 4 with ``samples``; as much as the largest layer's again, at least,
    while it is measured. ``memory_bytes`` caps both on every rank: ConfigError at the start if what is gathered does
    not fit. ConfigError for both ``window`` and ``samples``.
    """

    every_steps: int
    window: int | None = field(default=None, kw_only=True)
    samples: int | None = field(default=None, kw_only=True)
    memory_bytes: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        for name in ("every_steps", "window", "samples", "memory_bytes"):
            value = getattr(self, name)
            if name == "every_steps" or value is not None:
                check_count(name, value)
        if self.window is not None and self.samples is not None:
            raise ConfigError(
                f"window={self.window} adds gradients up and samples={self.samples} measures single steps: give one"
            )

    @property
    def sampled(self) -> int:
        """Single steps that are measured in a period; 0 where gradients add up."""
        return self.samples or 0

    @property
    def lag(self) -> int:
        """Steps that measuring, and then deciding, may take with ``deterministic``: a twentieth of the period each."""
        return max(1, self.every_steps // 20)

    @property
    def needs_errors(self) -> bool:
        """Whether decisions need what every choice loses."""
        return False

    def candidates(self) -> Candidates | None:
        """What layers may travel as; None for the default ranges."""
        return None

    def candidate_levels(self, environment: Environment) -> CandidateLevels:
        """The choices of every layer that is up for choice."""
        return make_candidates(
            environment.layers,
            environment.compressors,
            self.candidates(),
            environment.scheme,
            environment.topology,
        )

    def wider_levels(self, environment: Environment) -> CandidateLevels | None:
        """The choices of wider ranges, which take the place of these once most elements are at an end of theirs.

        None for controllers that keep their ranges.
        """
        return None

    @property
    def tells_ends(self) -> bool:
        """Whether a line of the log says so where most elements are at an end of their range."""
        return False

    def begin_memory(self, candidates: CandidateLevels) -> Doubles:
        """What the first decision finds in ``memory``; its length never changes."""
        return np.zeros(0)

    @abstractmethod
    def decide(self, observed: PeriodObservations) -> Decision:
        """Choose. On rank 0 only, on a background thread; a pure function."""

    def begin(self, environment: Environment) -> ControllerRun:
        """See :class:`PeriodicRun`."""
        return PeriodicRun(self, environment)
