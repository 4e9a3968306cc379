"""The base of controllers that share what every rank measured and let rank 0 decide: a state machine of phases."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np

from gradcomp.control.base import ControllerRun, Doubles, Environment, Step
from gradcomp.core.errors import StateError


class Phase(enum.Enum):
    """The phase that all ranks are in. Checkpoints hold the names."""

    IDLE = "no layer can be controlled"
    GATHER = "gradients are gathered until the period ends"
    OBSERVE = "steps are observed, and every rank measures in the background"
    PROBE = "the link is measured before the next step"
    MEASURE = "every rank measures its layers"
    SHARE = "measurements are summed over ranks in this step"
    DECIDE = "rank 0 decides"
    ANNOUNCE = "rank 0's decision is summed over ranks in this step"
    CRUISE = "the decision is in force"


#: The phases that end with a step in which all ranks are ready, and the phases that follow them.
AGREED = {Phase.OBSERVE: Phase.PROBE, Phase.MEASURE: Phase.SHARE, Phase.DECIDE: Phase.ANNOUNCE}

_MEASURING = (Phase.OBSERVE, Phase.PROBE, Phase.MEASURE, Phase.SHARE)
_DECIDING = (Phase.DECIDE, Phase.ANNOUNCE)


@dataclass
class PhasedState:
    """The saved state of every phased controller. ``begun``: the step in which the period or the observation began."""

    phase: Phase
    begun: int


S = TypeVar("S", bound=PhasedState)


class PhasedRun(ControllerRun, ABC, Generic[S]):
    """Measures, shares, decides, announces, applies; the phase changes in the same step on all ranks.

    Measuring, on every rank, and deciding, on rank 0, run in the background. Each ends with the first step in whose
    headers all ranks report that they are done; the step after that one carries the result in a sum over ranks. A
    subclass says what to measure, what to do with the sum, how to decide and how to apply the decision.
    """

    #: The phases that the controller goes through.
    PHASES: ClassVar[tuple[Phase, ...]]

    def __init__(self, name: str, environment: Environment, state: S) -> None:
        super().__init__(name, environment)
        self._state = state
        self._work: Future[Any] | None = None  # work of this phase; only rank 0 has some to decide
        self._step = 0

    @property
    def state(self) -> S:
        """Returns the state that a checkpoint holds, the same on all ranks."""
        return self._state

    @property
    def phase(self) -> Phase:
        return self._state.phase

    # -- interface of subclasses -------------------------------------------------------------------------------

    @abstractmethod
    def measuring(self) -> Callable[[], Any]:
        """Returns the work of this rank whose result is shared."""

    @abstractmethod
    def row(self, measured: Any) -> Doubles:
        """Returns this rank's summand of what is shared; of the same length on all ranks."""

    @abstractmethod
    def receive(self, step: Step, sums: Doubles) -> bool:
        """Receives the shared sums, the same on all ranks.

        Returns true if a decision can be made from them, else starts anew.
        """

    @abstractmethod
    def deciding(self) -> Callable[[], Any]:
        """Returns the work of rank 0 whose result is announced."""

    def announcement(self, decision: Any) -> Doubles:
        """Converts the decision to :attr:`announced` numbers."""
        return np.array(decision)

    @property
    @abstractmethod
    def announced(self) -> int:
        """Returns the length of an announcement."""

    @abstractmethod
    def apply(self, step: Step, sums: Doubles) -> bool:
        """Applies the decision and ends the phase. Returns true if :attr:`choices` changed."""

    @abstractmethod
    def resume(self, saved: S, own: Mapping[str, Mapping[str, Any]]) -> bool:
        """Restores the parts of a saved state that fit, except its phase. Returns true if that phase can continue."""

    @property
    def due(self) -> bool:
        """Returns true if the phase may end with this step."""
        return True

    def watch(self, step: Step) -> bool:
        """Handles a step that does not change the phase. Returns true if :attr:`choices` changed."""
        return False

    def report(self, step: int) -> Doubles | None:
        """Returns a summand for a step that neither shares nor announces, or None."""
        return None

    # -- the state machine -------------------------------------------------------------------------------------

    def begin(self, step: int) -> None:
        """Opens a step, and starts measuring if the phase needs it."""
        self._step = step
        if self._work is None and self.phase in _MEASURING:
            self._start()

    def _start(self) -> Future[Any] | None:
        """Starts the work of this phase, if this rank has any."""
        if self.phase in _MEASURING:
            self._work = self.environment.background(self.measuring())
        elif self.phase in _DECIDING and self.environment.rank == 0:
            self._work = self.environment.background(self.deciding())
        return self._work

    @property
    def ready(self) -> bool:
        """Returns true if this rank's work of the phase is done; raises the exception of that work."""
        if self.phase not in AGREED or not self.due or self._pending:
            return False
        if self._work is not None:
            self._work.result()
        return True

    @property
    def overdue(self) -> bool:
        """Returns true with ``deterministic`` if the phase ends with this step but this rank's work is not done."""
        return self.environment.deterministic and self.phase in AGREED and self.due and self._pending

    @property
    def _pending(self) -> bool:
        return self._work is not None and not self._work.done()

    def contribution(self, step: int) -> Doubles | None:
        """Returns this rank's row when measurements are shared, and rank 0's decision when it is announced."""
        if self.phase is Phase.SHARE:
            assert self._work is not None, "it was done when this rank said that it was ready"
            return self.row(self._work.result())
        if self.phase is Phase.ANNOUNCE:
            if self._work is None:
                return np.zeros(self.announced)
            return self.announcement(self._work.result())
        return self.report(step)

    def finish(self, step: Step) -> bool:
        """Advances the phase if all ranks can."""
        if self.phase is Phase.SHARE:
            assert step.sums is not None, "all ranks contributed"
            self._work = None
            if self.receive(step, step.sums):
                self._state.phase = Phase.DECIDE
                self._start()
        elif self.phase is Phase.ANNOUNCE:
            assert step.sums is not None, "all ranks contributed"
            self._work = None
            return self.apply(step, step.sums)
        elif step.agreed and self.phase in AGREED:
            self._state.phase = AGREED[self.phase]
        else:
            return self.watch(step)
        return False

    # -- state -------------------------------------------------------------------------------------------------

    def adopt(self, saved: S, own: Mapping[str, Mapping[str, Any]]) -> None:
        """Continues in the saved phase if the state is complete; its background work starts again."""
        if saved.phase not in self.PHASES:
            raise StateError(f"not a state of {self.name}: phase {saved.phase.name}")
        self._work = None
        if self.resume(saved, own):
            self._state.phase = saved.phase
        if self.phase in (Phase.OBSERVE, Phase.PROBE):
            return  # their work starts with the next step
        work = self._start()
        if self.phase in (Phase.SHARE, Phase.ANNOUNCE) and work is not None:
            work.exception()  # waits for the work, since the next step needs its result
