"""The pilot of Auto: observes steps and the link, predicts, chooses, and looks whether that still holds."""

from __future__ import annotations

import enum
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt

from gradcomp.compress import Compressor, Identity
from gradcomp.compress.policy import EXACT
from gradcomp.control import rates
from gradcomp.control.base import Doubles, Pilot, Setting, Step
from gradcomp.control.forecast import MARGIN, Observed, Rates, decide
from gradcomp.core.errors import StateError
from gradcomp.core.levels import level_text, short_name
from gradcomp.core.plan import Assignment, Plan
from gradcomp.reduce.costs import Network

logger = logging.getLogger("gradcomp")

Floats = npt.NDArray[np.float32]

#: The first steps of a run allocate, settle the order of buckets and compare parameters: they say little.
SETTLING_STEPS = 6
#: In place of the step in which an observation begins: after the next steps, as at the start.
_SOON = -1
#: After a change of plan, reports of so many steps are not of the new one.
_BEHIND_STEPS = 3


@dataclass(frozen=True)
class Limits:
    """The numbers of :class:`gradcomp.control.auto.Auto`, which says what they are."""

    warmup_steps: int
    hidden: float
    drift: float
    check_every: int


class Phase(enum.Enum):
    """What all ranks are at."""

    IDLE = "there is nothing to choose"
    OBSERVE = "steps are observed"
    PROBE = "the link is measured before the next step"
    SHARE = "what was observed is added over ranks in this step"
    DECIDE = "rank 0 predicts and chooses"
    ANNOUNCE = "rank 0's choice is added over ranks in this step"
    CRUISE = "the choice is in force"


class AutoPilot(Pilot):
    """Observe, probe, share, decide, announce, and look at step times; all ranks change phase in the same step.

    ``clock`` gives seconds. ``predicted``: seconds of a step by choice, at the last decision; ``network``: the link.
    """

    def __init__(
        self, name: str, compressors: Sequence[Compressor], limits: Limits, setting: Setting
    ) -> None:
        super().__init__(name, setting)
        self.compressors = tuple(compressors)
        self.limits = limits
        self.clock: Callable[[], float] = perf_counter
        self.phase = Phase.OBSERVE if self._has_a_choice else Phase.IDLE
        self.begun = setting.first_step + SETTLING_STEPS  # the first step that is observed
        self.current = 0
        self.decisions = 0
        self.predicted: list[float] = []
        self.network: Network | None = None
        self.baseline: float | None = None  # step time under the choice
        self.before: tuple[int, float] | None = (
            None  # the choice before, and its step time, until it was compared
        )
        self._step = 0
        self._position: list[int] | None = None  # by layer, the bucket it ends in, -1 if it does not travel
        self._buckets = 0
        self._rows: list[Floats] = []  # what was observed
        self._table: Doubles | None = None  # the same of all ranks
        self._rates: Future[Any] | None = None
        self._decision: Future[Any] | None = None
        self._ended: float | None = None  # when the last exchange did
        self._between: float | None = None  # seconds from then to the opening of this one
        self._choose()

    @property
    def _has_a_choice(self) -> bool:
        return bool(self.setting.controlled) and self.setting.world > 1

    @property
    def nbytes(self) -> int:
        """What was observed."""
        return sum(row.nbytes for row in self._rows)

    # -- while a step runs -------------------------------------------------------------------------------------

    @property
    def wants_network(self) -> bool:
        """Once all ranks have observed enough."""
        return self.phase is Phase.PROBE

    def hear(self, network: Network) -> None:
        """Share what was observed in the step that comes."""
        self.network = network
        if self.phase is Phase.PROBE:
            self.phase = Phase.SHARE

    def begin(self, step: int) -> None:
        """Note how long it took from the end of the last exchange."""
        self._step = step
        self._between = None if self._ended is None else self.clock() - self._ended
        if self.begun == _SOON:
            self.begun = step + SETTLING_STEPS
        if self.phase in (Phase.OBSERVE, Phase.PROBE, Phase.SHARE) and self._rates is None:
            compressors = self.compressors
            self._rates = self.setting.background(lambda: [rates.measure_rates(c) for c in compressors])

    @property
    def ready(self) -> bool:
        """Whether this rank has observed enough, or decided. Raises what the work raised."""
        if self.phase is Phase.OBSERVE and self._step >= self.begun + self.limits.warmup_steps:
            return self._rates is not None and self._rates.done()
        if self.phase is Phase.DECIDE:
            return self._decision is None or self._decision.done()
        return False

    def contribution(self, step: int) -> Doubles | None:
        """In three phases: this rank's row of the table, rank 0's decision, and the step time."""
        if self.phase is Phase.SHARE:
            table = np.zeros((self.setting.world, self._width))
            table[self.setting.rank] = self._row()
            return table.reshape(-1)
        if self.phase is Phase.ANNOUNCE:
            if self._decision is None:
                return np.zeros(3 + len(self.compressors))
            return np.array(self._decision.result())
        if self.phase is Phase.CRUISE and self._looks(step):
            return np.array([_median(self._rows)[0] / self.setting.world])
        return None

    def finish(self, step: Step) -> bool:
        """Go on to the next phase, if all ranks can."""
        self._ended = self.clock()
        if self.phase is Phase.OBSERVE:
            self._observe(step)
        elif self.phase is Phase.SHARE:
            assert step.sums is not None, "all ranks contributed"
            self._read_table(step, step.sums)
        elif self.phase is Phase.DECIDE and step.agreed:
            self.phase = Phase.ANNOUNCE
        elif self.phase is Phase.ANNOUNCE:
            assert step.sums is not None, "all ranks contributed"
            return self._take_choice(step, step.sums)
        elif self.phase is Phase.CRUISE:
            return self._watch(step)
        return False

    # -- observe -----------------------------------------------------------------------------------------------

    def _observe(self, step: Step) -> None:
        """One row a step: its seconds, and those from the end of the last exchange to the opening and to each bucket.

        Ranks end an exchange together, so that this is the time on which they all agree. Buckets that change begin
        the observation anew.
        """
        if step.agreed:
            self.phase = Phase.PROBE
            return
        if step.number < self.begun:
            return
        position = self._places(step)
        if self._position is not None and (position != self._position or len(step.ready) != self._buckets):
            self._again(step.number + 1)
            return
        self._position, self._buckets = position, len(step.ready)
        known = self._between is not None and step.seconds > 0
        if known and step.number < self.begun + self.limits.warmup_steps:
            opened = np.float64(self._between)
            times = np.concatenate([[step.seconds, opened], opened + step.ready])
            self._rows.append(times.astype(np.float32))

    def _places(self, step: Step) -> list[int]:
        """The bucket that each layer ends in, -1 for sparse ones, which travel in none."""
        travels = (step.sent > 0) | np.array([layer.size == 0 for layer in self.setting.layers])
        return [int(place) for place in np.where(travels, step.position, -1)]

    def _again(self, begun: int) -> None:
        """Observe from a step on."""
        self.phase, self.begun = Phase.OBSERVE, begun
        self._rows, self._position, self._table = [], None, None

    @property
    def _width(self) -> int:
        """Columns of the table: the step, the opening, the buckets, and two rates of each choice."""
        return 2 + self._buckets + 2 * len(self.compressors)

    def _row(self) -> Doubles:
        """This rank's row; NaN where it observed nothing."""
        assert self._rates is not None, "begun with the first step that was observed"
        measured = [(one.encode, one.decode) for one in self._rates.result()]
        times = _median(self._rows, 2 + self._buckets)
        return np.concatenate([times, np.array(measured, dtype=np.float64).reshape(-1)])

    # -- decide ------------------------------------------------------------------------------------------------

    def _read_table(self, step: Step, sums: Doubles) -> None:
        """The same on all ranks. A rank that observed nothing begins again, and all with it."""
        table = sums.reshape(self.setting.world, self._width)
        self._rates = None
        if not np.isfinite(table).all():
            self._again(step.number + 1)
            return
        self._table, self._rows = table, []
        self.phase = Phase.DECIDE
        self._start()

    def _start(self) -> None:
        """Predict and choose, on rank 0."""
        self._decision = None
        if self.setting.rank:
            return
        assert self._table is not None, "it was shared"
        assert self._position is not None, "it was noted with the first step that was observed"
        assert self.network is not None, "it was heard before the table was shared"
        columns = 2 + self._buckets
        speeds = self._table[:, columns:].min(axis=0).reshape(-1, 2).tolist()
        observed = Observed(
            self._position,
            self._table[:, 1:columns].max(axis=0).tolist(),
            [Rates(*pair) for pair in speeds],
            self.network,
        )
        chosen, hidden = self.current, self.limits.hidden
        self._decision = self.setting.background(
            lambda: decide(self.setting, self.compressors, chosen, observed, hidden)
        )

    def _take_choice(self, step: Step, sums: Doubles) -> bool:
        assert self._table is not None, "it was shared"
        seconds = sum(self._table[:, 0].tolist()) / self.setting.world
        before, chosen = self.current, int(sums[0])
        self.predicted = sums[3:].tolist()
        self._decision, self._table = None, None
        self.decisions += 1
        self._adopt(chosen, step)
        self.reason = self._explain(float(sums[1]), float(sums[2]))
        if before == chosen and self.setting.rank == 0:
            logger.info("step %d: %s stays with %s", step.number, self.name, self.reason)  # no plan says it
        self.before = None if before == chosen else (before, seconds)
        return before != chosen

    def _adopt(self, choice: int, step: Step) -> None:
        """Go on under a choice, which is compared with nothing yet."""
        self.current = choice
        self._choose()
        self.phase, self.begun = Phase.CRUISE, step.number + _BEHIND_STEPS
        self.baseline, self.before, self._rows = None, None, []

    def _choose(self) -> None:
        choice = self.compressors[self.current]
        self.choices = dict.fromkeys(self.setting.controlled, choice)

    def plan(self, before: Plan) -> Plan:
        """The choice for the layers that take one. The others ride along exactly, in sums beside sums."""
        rows = list(super().plan(before).assignments)
        exact = EXACT if self.compressors[self.current].reduces else Identity()
        plain = (EXACT.family_string(), Identity().family_string())
        for i, layer in enumerate(self.setting.layers):
            if i not in self.choices and layer.dtype != "float64" and rows[i].compressor in plain:
                rows[i] = Assignment(layer.name, exact.family_string(), exact.level)
        return Plan(before.version + 1, tuple(rows))

    def _explain(self, compute: float, exposed: float) -> str:
        network = self.network
        assert network is not None, "the choice was made from it"
        names = _names(self.compressors)
        others = ", ".join(
            f"{name} {1e3 * seconds:.1f}"
            for i, (name, seconds) in enumerate(zip(names, self.predicted, strict=True))
            if i != self.current
        )
        between = len(self.setting.topology.leaders) > 1
        alpha, beta = (network.alpha, network.beta) if between else (network.local_alpha, network.local_beta)
        seconds = self.predicted[self.current]
        return (
            f"{names[self.current]}: {1e3 * seconds:.1f} ms a step predicted, {1e3 * exposed:.1f} of them exposed"
            f"{f', against {others}' if others else ''}; link {8e-9 / beta:.3g} Gbit/s, {1e3 * alpha:.2f} ms; "
            f"compute {1e3 * compute:.1f} ms"
        )

    # -- cruise ------------------------------------------------------------------------------------------------

    def _looks(self, step: int) -> bool:
        """Whether ranks compare step times in this step: soon after the choice, and then every so often."""
        since = step - self.begun - self.limits.warmup_steps
        return since >= 0 and since % self.limits.check_every == 0

    def _watch(self, step: Step) -> bool:
        """Step times since the last look; what a rank that just began has not seen is skipped."""
        if self._looks(step.number):
            assert step.sums is not None, "all ranks contributed"
            self._rows = []
            seconds = float(step.sums[0])
            if math.isfinite(seconds) and self._looked(step, seconds):
                return True
        if self.phase is Phase.CRUISE and step.number >= self.begun and step.seconds > 0:
            self._rows.append(np.array([step.seconds], dtype=np.float32))
        return False

    def _looked(self, step: Step, seconds: float) -> bool:
        """What a step takes by now: the baseline, a drift, or more than before the choice. Whether that is undone."""
        if self.before is not None:
            choice, limit = self.before
            if seconds > limit * (1 if choice < self.current else 1 + self.limits.hidden + MARGIN):
                names, now = _names(self.compressors), self.current
                self.reason = (
                    f"{names[choice]}: back to {1e3 * limit:.1f} ms a step, {names[now]} takes {1e3 * seconds:.1f}, "
                    f"{1e3 * self.predicted[now]:.1f} were predicted"
                )
                self._adopt(choice, step)
                self.baseline = limit  # should it not be reached again, something else has changed as well
                return True
            self.before = None
        if self.baseline is None:
            self.baseline = seconds
        elif abs(seconds - self.baseline) > self.limits.drift * self.baseline:
            if self.setting.rank == 0:
                logger.info(
                    "step %d: %s measures anew: %.1f ms a step, %.1f after the last choice",
                    step.number,
                    self.name,
                    1e3 * seconds,
                    1e3 * self.baseline,
                )
            self._again(step.number + 1)
        return False

    # -- state -------------------------------------------------------------------------------------------------

    def shared_state(self) -> dict[str, Any]:
        """Phase, choice, what it was made from, and what step times are compared with."""
        names = [layer.name for layer in self.setting.layers]
        return {
            "world": self.setting.world,
            "phase": self.phase.name,
            "begun": self.begun,
            "choice": self.compressors[self.current].to_string(),
            "decisions": self.decisions,
            "predicted": list(self.predicted),
            "reason": self.reason,
            "network": None if self.network is None else asdict(self.network),
            "baseline": self.baseline,
            "before": None
            if self.before is None
            else [self.compressors[self.before[0]].to_string(), self.before[1]],
            "buckets": self._buckets,
            "position": None if self._position is None else dict(zip(names, self._position, strict=True)),
            "table": None if self._table is None else self._table.tolist(),
        }

    def own_state(self) -> dict[str, dict[str, Floats]]:
        """The times that this rank has noted, under the name of the first layer: they are no layer's."""
        if not self._rows:
            return {}
        return {"times": {self.setting.layers[0].name: np.concatenate(self._rows)}}

    def restore(self, shared: Mapping[str, Any], own: Mapping[str, Mapping[str, Any]]) -> None:
        """Go on in the phase that was saved; work in the background begins again.

        Among other ranks, or with other layers, the choice is kept and all is measured anew. A choice that there is no
        more gives way to the first.
        """
        names = [layer.name for layer in self.setting.layers]
        try:
            phase, begun, buckets = Phase[shared["phase"]], int(shared["begun"]), int(shared["buckets"])
            choice, decisions = str(shared["choice"]), int(shared["decisions"])
            predicted, reason = [float(s) for s in shared["predicted"]], str(shared["reason"])
            network = None if shared["network"] is None else Network(**shared["network"])
            baseline = None if shared["baseline"] is None else float(shared["baseline"])
            earlier = (
                None if shared["before"] is None else (str(shared["before"][0]), float(shared["before"][1]))
            )
            places = {str(name): int(place) for name, place in (shared["position"] or {}).items()}
            table = None if shared["table"] is None else np.array(shared["table"], dtype=np.float64)
            same = int(shared["world"]) == self.setting.world
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise StateError(f"not a state of {self.name}: {error!r}") from error
        known = [compressor.to_string() for compressor in self.compressors]
        self.current = known.index(choice) if choice in known else 0
        self._choose()
        self._ended, self._rates = None, None
        self.before = (known.index(earlier[0]), earlier[1]) if earlier and earlier[0] in known else None
        self.decisions, self.reason = decisions, reason
        self.network, self.baseline, self.begun = network, baseline, begun
        self.predicted, self._buckets, self._table = predicted, buckets, table
        self._position = [places.get(name, -1) for name in names] if places else None
        times = np.array(own.get("times", {}).get(names[0], np.zeros(0)), dtype=np.float32)
        width = 1 if phase is Phase.CRUISE else 2 + max(buckets, 0)
        self._rows = list(times[: len(times) // width * width].reshape(-1, width))
        same &= choice in known and len(predicted) in (0, len(known)) and places.keys() in (set(), set(names))
        if not self._has_a_choice:
            self.phase = Phase.IDLE
        elif same and self._can_go_on(phase):
            self.phase = phase
        else:
            self.predicted = []
            self._again(_SOON)
        if self.phase in (Phase.DECIDE, Phase.ANNOUNCE):
            self._start()
        if self.phase is Phase.ANNOUNCE and self._decision is not None:
            self._decision.exception()  # what is due in the next step is waited for

    def _can_go_on(self, phase: Phase) -> bool:
        """Whether everything is there that the phase needs."""
        if phase in (Phase.IDLE, Phase.OBSERVE, Phase.CRUISE):
            return phase is not Phase.IDLE
        if self._position is None or (phase is not Phase.PROBE and self.network is None):
            return False
        shape = None if self._table is None else self._table.shape
        return phase in (Phase.PROBE, Phase.SHARE) or shape == (self.setting.world, self._width)


def _median(rows: Sequence[Floats], width: int = 1) -> Doubles:
    """By column; NaN if there is no row."""
    if not rows:
        return np.full(width, np.nan)
    return np.median(np.stack(rows).astype(np.float64), axis=0)


def _names(compressors: Sequence[Compressor]) -> list[str]:
    """Short names, or string forms if those would be equal."""
    short = []
    for compressor in compressors:
        family = compressor.family_string()
        name = "none" if isinstance(compressor, Identity) else short_name(family)
        short.append(f"{name} {level_text(family, compressor.level)}".strip())
    return short if len(set(short)) == len(short) else [c.to_string() for c in compressors]
