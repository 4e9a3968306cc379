"""The base class of controllers that decide periodically, from the gradients of a period."""

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

    Each layer is owned by one rank, which gathers its own gradients of the layer, before compression, and measures them
    on a background thread. Tables are summed over ranks, so that all ranks have the same one; rank 0 decides, also in
    the background, and shares its choice. Each sum takes place in the first step in which all ranks are ready, so no
    step waits. With the setting ``deterministic`` each takes place :attr:`lag` steps after its work began, and that
    step waits for ranks that are not ready.

    ``window``: gradients are summed, without error feedback, over the last this many steps of a period; by default over
    all of them. ``samples``: instead, this many single steps, spread over the period, are measured separately; norms,
    including those of errors, are root mean squares over them. A layer whose choices are all of low rank is then
    measured with its residual.

    Wire: twice a period one sum of a table of float64 over ranks, the first with the learning rate.

    State: 8 bytes per element of the model, divided among the ranks, or 4 with ``samples``, and at least as much as the
    largest layer again while it is measured. ``memory_bytes`` limits both on every rank.

    Errors: ConfigError at the start if the gathered values do not fit into ``memory_bytes``, and if both ``window`` and
    ``samples`` are given.
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
        """Returns the number of single steps that are measured in a period; 0 if gradients are summed."""
        return self.samples or 0

    @property
    def lag(self) -> int:
        """Returns the steps that measuring and deciding may each take with ``deterministic``: 1/20 of the period."""
        return max(1, self.every_steps // 20)

    @property
    def needs_errors(self) -> bool:
        """Returns true if decisions need the error of every choice."""
        return False

    def candidates(self) -> Candidates | None:
        """Returns the candidates of layers; None for the default ranges."""
        return None

    def candidate_levels(self, environment: Environment) -> CandidateLevels:
        """Returns the choices of every controlled layer."""
        return make_candidates(
            environment.layers,
            environment.compressors,
            self.candidates(),
            environment.scheme,
            environment.topology,
        )

    def wider_levels(self, environment: Environment) -> CandidateLevels | None:
        """Returns wider choices, which replace these once most elements are at an end of their range.

        Controllers that keep their ranges return None.
        """
        return None

    @property
    def tells_ends(self) -> bool:
        """Returns true if the log reports that most elements are at an end of their range."""
        return False

    def begin_memory(self, candidates: CandidateLevels) -> Doubles:
        """Returns the ``memory`` of the first decision; its length never changes."""
        return np.zeros(0)

    @abstractmethod
    def decide(self, observed: PeriodObservations) -> Decision:
        """Chooses. A pure function that runs on rank 0 only, on a background thread."""

    def begin(self, environment: Environment) -> ControllerRun:
        return PeriodicRun(self, environment)
