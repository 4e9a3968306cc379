"""Controllers that share what every rank measured and let rank 0 decide: one machine of phases for all of them."""

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
from gradcomp.reduce.model import Network


class Phase(enum.Enum):
    """What all ranks are at. Checkpoints hold the names."""

    IDLE = "there is nothing to choose"
    GATHER = "gradients add up until the period ends"
    OBSERVE = "steps are observed, and every rank measures beside them"
    PROBE = "the link is measured before the next step"
    MEASURE = "every rank measures its layers"
    SHARE = "what ranks measured is added over ranks in this step"
    DECIDE = "rank 0 decides"
    ANNOUNCE = "rank 0's decision is added over ranks in this step"
    CRUISE = "the decision is in force"


#: The phases that end with a step in which all ranks are ready, and what follows them.
AGREED = {Phase.OBSERVE: Phase.PROBE, Phase.MEASURE: Phase.SHARE, Phase.DECIDE: Phase.ANNOUNCE}

_MEASURING = (Phase.OBSERVE, Phase.PROBE, Phase.MEASURE, Phase.SHARE)
_DECIDING = (Phase.DECIDE, Phase.ANNOUNCE)


@dataclass
class PhasedState:
    """What every phased controller saves. ``begun``: the step in which the period, or the observation, began."""

    phase: Phase
    begun: int


S = TypeVar("S", bound=PhasedState)


class PhasedRun(ControllerRun, ABC, Generic[S]):
    """Measure, share, decide, announce, apply; the phase changes in the same step on all ranks.

    Measuring, on every rank, and deciding, on rank 0, run in the background. Each ends with the first step in which the
    headers say that it is done everywhere; the step after that one carries the result in a sum over ranks. A controller
    says what it measures, what it does with the sum, how it decides and how the decision is applied.
    """

    #: Those that the controller goes through.
    PHASES: ClassVar[tuple[Phase, ...]]

    def __init__(self, name: str, environment: Environment, state: S) -> None:
        super().__init__(name, environment)
        self._state = state
        self._work: Future[Any] | None = None  # of this phase; on ranks other than 0, there is none to decide
        self._step = 0

    @property
    def state(self) -> S:
        """What a checkpoint holds, the same on all ranks."""
        return self._state

    @property
    def phase(self) -> Phase:
        """What all ranks are at."""
        return self._state.phase

    # -- what a controller brings ------------------------------------------------------------------------------

    @abstractmethod
    def measuring(self) -> Callable[[], Any]:
        """The work of this rank whose result is shared."""

    @abstractmethod
    def row(self, measured: Any) -> Doubles:
        """This rank's summand of what is shared; of the same length on all ranks."""

    @abstractmethod
    def receive(self, step: Step, sums: Doubles) -> bool:
        """Take in what was shared, the same on all ranks. Whether it can be decided from; else begin anew."""

    @abstractmethod
    def deciding(self) -> Callable[[], Any]:
        """The work of rank 0 whose result is announced."""

    @abstractmethod
    def announcement(self, decision: Any) -> Doubles:
        """The decision as numbers, of the length :attr:`announced`."""

    @property
    @abstractmethod
    def announced(self) -> int:
        """How many numbers an announcement has."""

    @abstractmethod
    def apply(self, step: Step, sums: Doubles) -> bool:
        """Take the decision. Returns whether :attr:`choices` changed. It ends the phase."""

    @abstractmethod
    def resume(self, saved: S, own: Mapping[str, Mapping[str, Any]]) -> bool:
        """Take over from a saved state what fits here, without its phase. Whether that phase can go on."""

    @property
    def due(self) -> bool:
        """Whether the phase may end with this step."""
        return True

    def watch(self, step: Step) -> bool:
        """A step is done in which ranks did not agree on a change of phase. Whether :attr:`choices` changed."""
        return False

    def report(self, step: int) -> Doubles | None:
        """What is added over ranks in a step that neither shares nor announces."""
        return None

    # -- the machine -------------------------------------------------------------------------------------------

    def begin(self, step: int) -> None:
        """A step opens: what has to be measured is under way."""
        self._step = step
        if self._work is None and self.phase in _MEASURING:
            self._start()

    def _start(self) -> Future[Any] | None:
        """Begin the work that the phase needs of this rank, if it needs any."""
        if self.phase in _MEASURING:
            self._work = self.environment.background(self.measuring())
        elif self.phase in _DECIDING and self.environment.rank == 0:
            self._work = self.environment.background(self.deciding())
        return self._work

    @property
    def wants_network(self) -> bool:
        """In the phase that is there for it."""
        return self.phase is Phase.PROBE

    def hear(self, network: Network) -> None:
        """The link was measured: share what was measured in the step that comes."""
        if self.phase is Phase.PROBE:
            self._state.phase = Phase.SHARE

    @property
    def ready(self) -> bool:
        """Whether this rank's part of the phase is done. Raises what the work raised."""
        if self.phase not in AGREED or not self.due or self._pending:
            return False
        if self._work is not None:
            self._work.result()
        return True

    @property
    def overdue(self) -> bool:
        """With ``deterministic``: the phase ends with this step, and this rank's part of it is not done."""
        return self.environment.deterministic and self.phase in AGREED and self.due and self._pending

    @property
    def _pending(self) -> bool:
        return self._work is not None and not self._work.done()

    def contribution(self, step: int) -> Doubles | None:
        """This rank's row of what is shared, and rank 0's decision."""
        if self.phase is Phase.SHARE:
            assert self._work is not None, "it was done when this rank said that it was ready"
            return self.row(self._work.result())
        if self.phase is Phase.ANNOUNCE:
            if self._work is None:
                return np.zeros(self.announced)
            return self.announcement(self._work.result())
        return self.report(step)

    def finish(self, step: Step) -> bool:
        """Go on to the next phase, if all ranks can."""
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
        """Go on in the phase that was saved, if all is there; its work in the background begins again."""
        if saved.phase not in self.PHASES:
            raise StateError(f"not a state of {self.name}: phase {saved.phase.name}")
        self._work = None
        if self.resume(saved, own):
            self._state.phase = saved.phase
        if self.phase in (Phase.OBSERVE, Phase.PROBE):
            return  # theirs begins with the next step
        work = self._start()
        if self.phase in (Phase.SHARE, Phase.ANNOUNCE) and work is not None:
            work.exception()  # what is due in the next step is waited for
