"""Auto chooses the least compression that hides the communication on this network."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, ClassVar

import numpy as np

from gradcomp.compress import Compressor, Identity
from gradcomp.compress.checks import check_positive, check_whole
from gradcomp.compress.policy import AUTO_CHOICES, EXACT, assign, resolve
from gradcomp.control.base import Controller, Doubles, Environment, Step
from gradcomp.control.distortion.round_trip import Rates, measure_rates
from gradcomp.control.forecast import MARGIN, Observed, assignment, decide, slower
from gradcomp.control.phased import Phase, PhasedRun, PhasedState
from gradcomp.core.errors import ConfigError
from gradcomp.core.plan import Plan, level_text, short_name
from gradcomp.core.vectors import Floats
from gradcomp.reduce.model import Network

#: A fitted rate above this one means that messages of the probe's size cost only their latency.
_MOST_GBIT = 1000

logger = logging.getLogger("gradcomp")
#: The first steps of a run allocate memory, fix the order of exchange buckets and compare parameters, so their times
#: are not typical.
SETTLING_STEPS = 6
#: Stands for a step that is not known yet: the observation begins SETTLING_STEPS after the next step.
_SOON = -1
#: After a change of plan, the reports of this many steps still describe the previous plan.
_BEHIND_STEPS = 3


@dataclass
class AutoState(PhasedState):
    """The state of Auto: ``choice`` is the current one in string form.

    ``predicted``: seconds of a step by choice, at the last decision. ``baseline``: the step time that later ones are
    compared with. ``before``: the previous choice and its step time, until they were compared. ``position``: by layer
    name, the last exchange bucket that the layer is in, -1 if it is in none. ``table``: the observations of all ranks.
    """

    world: int
    choice: str
    decisions: int
    predicted: list[float]
    reason: str
    network: Network | None
    baseline: float | None
    before: tuple[str, float] | None
    buckets: int
    position: dict[str, int] | None
    table: Doubles | None

    def is_complete(self, shape: tuple[int, int]) -> bool:
        """Returns true if all that the phase needs is present; a table must have the given shape."""
        if self.phase in (Phase.OBSERVE, Phase.CRUISE):
            return True
        if self.position is None or (self.phase is not Phase.PROBE and self.network is None):
            return False
        if self.phase in (Phase.DECIDE, Phase.ANNOUNCE):
            return self.table is not None and self.table.shape == shape
        return self.phase in (Phase.PROBE, Phase.SHARE)


def explain(
    state: AutoState,
    compressors: Sequence[Compressor],
    chosen: int,
    compute_and_exposed: Sequence[float],
    between_hosts: bool,
) -> str:
    """Returns the prediction for the choice and for the others, and the measurements that it was made from."""
    network, names = state.network, names_of(compressors)
    assert network is not None, "the choice was made from it"
    milliseconds = [f"{1e3 * seconds:.1f}" for seconds in state.predicted]
    compute, exposed = (f"{1e3 * seconds:.1f}" for seconds in compute_and_exposed)
    others = ", ".join(f"{names[i]} {time}" for i, time in enumerate(milliseconds) if i != chosen)
    alpha = network.alpha if between_hosts else network.local_alpha
    rate = 8e-9 / (network.beta if between_hosts else network.local_beta)
    speed = f"{rate:.3g}" if rate <= _MOST_GBIT else f"above {_MOST_GBIT}"
    return (
        f"{names[chosen]}: {milliseconds[chosen]} ms a step predicted, {exposed} of them exposed"
        f"{f', against {others}' * bool(others)}; link {speed} Gbit/s, {1e3 * alpha:.2f} ms; compute {compute} ms"
    )


def names_of(compressors: Sequence[Compressor]) -> list[str]:
    """Returns short names, or string forms if short names would be ambiguous."""
    short = []
    for compressor in compressors:
        family = compressor.family_string()
        name = "none" if isinstance(compressor, Identity) else short_name(family)
        short.append(f"{name} {level_text(family, compressor.level)}".strip())
    return short if len(set(short)) == len(short) else [c.to_string() for c in compressors]


def median(rows: Sequence[Floats], width: int = 1) -> Doubles:
    """Returns the median of each column; NaN if there is no row."""
    if not rows:
        return np.full(width, np.nan)
    return np.median(np.stack(rows).astype(np.float64), axis=0)


class AutoRun(PhasedRun[AutoState]):
    """Observes, probes, shares, decides, announces, and compares step times. ``clock`` returns seconds."""

    PHASES = (Phase.IDLE, Phase.OBSERVE, Phase.PROBE, Phase.SHARE, Phase.DECIDE, Phase.ANNOUNCE, Phase.CRUISE)

    def __init__(self, controller: Auto, environment: Environment) -> None:
        self.controller, self.compressors = controller, tuple(map(resolve, controller.choices))
        self._forms = [compressor.to_string() for compressor in self.compressors]
        self._names = [layer.name for layer in environment.layers]
        self._has_a_choice = bool(environment.controlled) and environment.world > 1
        phase = Phase.OBSERVE if self._has_a_choice else Phase.IDLE
        begun = environment.first_step + SETTLING_STEPS  # the first observed step
        nothing: tuple[Any, ...] = (0, [], "", None, None, None, 0, None, None)
        state = AutoState(phase, begun, environment.world, self._forms[0], *nothing)
        super().__init__(controller.name, environment, state)
        self.clock: Callable[[], float] = perf_counter
        self._rows: list[Floats] = []  # the times of the observed steps
        self._ended: float | None = None  # when the last exchange ended
        self._between: float | None = None  # seconds from that end to the opening of this step
        self._choose(0)

    @property
    def current(self) -> int:
        """Returns the index of the current choice."""
        return self._forms.index(self._state.choice)

    def _choose(self, number: int) -> None:
        self._state.choice = self._forms[number]
        self.choices = dict.fromkeys(self.environment.controlled, self.compressors[number])

    def plan(self, before: Plan) -> Plan:
        """Gives the current choice to the controlled layers.

        The other layers are exact; if the choice is summed over ranks, so are they, in the same exchange buckets.
        """
        rows = list(before.assignments)
        replaced = (EXACT.family_string(), Identity().family_string())
        for i, compressor in enumerate(assignment(self.environment, self.compressors[self.current])):
            if i in self.choices or rows[i].compressor in replaced:
                rows[i] = assign(rows[i].layer, compressor)
        return Plan(before.version + 1, tuple(rows))

    # -- observe and share -------------------------------------------------------------------------------------

    def begin(self, step: int) -> None:
        """Notes how long it took from the end of the last exchange to the opening of this step."""
        self._between = None if self._ended is None else self.clock() - self._ended
        if self._state.begun == _SOON:
            self._state.begun = step + SETTLING_STEPS
        super().begin(step)

    def finish(self, step: Step) -> bool:
        """Notes when the exchange ended, and advances the phase."""
        self._ended = self.clock()
        return super().finish(step)

    @property
    def due(self) -> bool:
        """Returns true once enough steps were observed."""
        enough = self._state.begun + self.controller.warmup_steps
        return self.phase is not Phase.OBSERVE or self._step >= enough

    def measuring(self) -> Callable[[], list[Rates]]:
        """Returns the work that times the codec of every choice."""
        return lambda: [measure_rates(compressor) for compressor in self.compressors]

    def watch(self, step: Step) -> bool:
        """Notes the times of an observed step, or compares step times once a choice is made."""
        if self.phase is Phase.OBSERVE:
            self._observe(step)
        return self.phase is Phase.CRUISE and self._cruise(step)

    def _observe(self, step: Step) -> None:
        """Appends a row: the step's seconds, and those from the last exchange's end to the opening and to each bucket.

        Ranks end an exchange together, so they agree on that time. The observation starts again if the exchange buckets
        change.
        """
        state = self._state
        if step.number < state.begun:
            return
        # Layers with sparse gradients are in no exchange bucket.
        travels = (step.sent > 0) | np.array([layer.size == 0 for layer in self.environment.layers])
        places = np.where(travels, step.position, -1).tolist()
        position = dict(zip(self._names, places, strict=True))
        if state.position is not None and (position != state.position or len(step.ready) != state.buckets):
            self._observe_from(step.number + 1)
            return
        state.position, state.buckets = position, len(step.ready)
        known = self._between is not None and step.seconds > 0
        if known and step.number < state.begun + self.controller.warmup_steps:
            opened = np.float64(self._between)
            times = np.concatenate([[step.seconds, opened], opened + step.ready])
            self._rows.append(times.astype(np.float32))

    def _observe_from(self, begun: int) -> None:
        state = self._state
        state.phase, state.begun, state.position, state.table = Phase.OBSERVE, begun, None, None
        self._rows = []

    @property
    def wants_network(self) -> bool:
        return self.phase is Phase.PROBE

    def hear(self, network: Network) -> None:
        """Receives the measurement of the link; the next step shares measurements."""
        self._state.network = network
        if self.phase is Phase.PROBE:
            self._state.phase = Phase.SHARE

    @property
    def _width(self) -> int:
        """Returns the columns of the table: the step, the opening, the exchange buckets, two rates of each choice."""
        return 2 + self._state.buckets + 2 * len(self.compressors)

    def row(self, measured: Sequence[Rates]) -> Doubles:
        """Returns this rank's row of the table; NaN where the rank observed nothing."""
        table = np.zeros((self.environment.world, self._width))
        speeds = np.array([(one.encode, one.decode) for one in measured], dtype=np.float64)
        times = median(self._rows, 2 + self._state.buckets)
        table[self.environment.rank] = np.concatenate([times, speeds.reshape(-1)])
        return table.reshape(-1)

    def receive(self, step: Step, sums: Doubles) -> bool:
        """Stores the table. If a rank observed nothing, all ranks observe again."""
        table = sums.reshape(self.environment.world, self._width)
        if not np.isfinite(table).all():
            self._observe_from(step.number + 1)
            return False
        self._state.table, self._rows = table, []
        return True

    # -- decide and apply --------------------------------------------------------------------------------------

    def deciding(self) -> Callable[[], list[float]]:
        """Returns the work that predicts the step for every choice and chooses."""
        state, columns = self._state, 2 + self._state.buckets
        assert state.table is not None, "it was shared"
        assert state.position is not None, "it was noted with the first step that was observed"
        assert state.network is not None, "it was heard before the table was shared"
        rates = [Rates(*pair) for pair in state.table[:, columns:].min(axis=0).reshape(-1, 2).tolist()]
        seconds = state.table[:, 1:columns].max(axis=0).tolist()
        position = list(state.position.values())
        observed = Observed(position, seconds, rates, state.network, self._step_seconds)
        current, hidden = self.current, self.controller.hidden
        return lambda: decide(self.environment, self.compressors, current, observed, hidden)

    @property
    def _step_seconds(self) -> float:
        """Returns the step time during the observation: the mean over ranks of their medians."""
        assert self._state.table is not None, "it was shared"
        return float(self._state.table[:, 0].sum()) / self.environment.world

    @property
    def announced(self) -> int:
        """Returns 4 + choices: the choice, seconds computed and exposed, the link's factor, a prediction by choice."""
        return 4 + len(self.compressors)

    def apply(self, step: Step, sums: Doubles) -> bool:
        """Switches to the choice, which is later compared with the step time before it."""
        state, before, chosen = self._state, self.current, int(sums[0])
        assert state.network is not None, "the choice was made from it"
        seconds = self._step_seconds
        state.network = slower(state.network, float(sums[3]))
        state.predicted, state.table = sums[4:].tolist(), None
        state.decisions += 1
        self._cruise_under(chosen, step)
        between = len(self.environment.topology.leaders) > 1
        self.reason = state.reason = explain(state, self.compressors, chosen, sums[1:3].tolist(), between)
        if before == chosen and self.environment.rank == 0:
            # No new plan is logged, so this line says what was decided.
            logger.info("step %d: %s stays with %s", step.number, self.name, self.reason)
        state.before = None if before == chosen else (self._forms[before], seconds)
        return before != chosen

    def _cruise_under(self, choice: int, step: Step) -> None:
        """Continues with a choice that has no step times to compare with yet."""
        self._choose(choice)
        state = self._state
        state.phase, state.begun = Phase.CRUISE, step.number + _BEHIND_STEPS
        state.baseline, state.before, self._rows = None, None, []

    # -- cruise ------------------------------------------------------------------------------------------------

    def _looks(self, step: int) -> bool:
        """Returns true in steps that compare times: ``warmup_steps`` after the choice, then every ``check_every``."""
        since = step - self._state.begun - self.controller.warmup_steps
        return since >= 0 and since % self.controller.check_every == 0

    def report(self, step: int) -> Doubles | None:
        """Returns this rank's median step time in steps in which ranks compare it."""
        if self.phase is not Phase.CRUISE or not self._looks(step):
            return None
        return np.array([median(self._rows)[0] / self.environment.world])

    def _cruise(self, step: Step) -> bool:
        """Collects step times since the last comparison, which is skipped if some rank has none and gives NaN."""
        if self._looks(step.number):
            assert step.sums is not None, "all ranks contributed"
            self._rows = []
            seconds = float(step.sums[0])
            if math.isfinite(seconds) and self._looked(step, seconds):
                return True
        if self.phase is Phase.CRUISE and step.number >= self._state.begun and step.seconds > 0:
            self._rows.append(np.array([step.seconds], dtype=np.float32))
        return False

    def _looked(self, step: Step, seconds: float) -> bool:
        """Compares the step time with the one before the choice or with the baseline.

        Returns true if the choice is undone; begins to observe again after a drift.
        """
        state, now = self._state, self.current
        if state.before is not None:
            form, limit = state.before
            choice = self._forms.index(form)
            if seconds > limit * (1 if choice < now else 1 + self.controller.hidden + MARGIN):
                names = names_of(self.compressors)
                self.reason = state.reason = (
                    f"{names[choice]}: back to {1e3 * limit:.1f} ms a step, {names[now]} takes {1e3 * seconds:.1f}, "
                    f"{1e3 * state.predicted[now]:.1f} were predicted"
                )
                self._cruise_under(choice, step)
                # If steps do not become as short as before again, something besides the choice has changed.
                state.baseline = limit
                return True
            state.before = None
        if state.baseline is None:
            state.baseline = seconds
        elif abs(seconds - state.baseline) > self.controller.drift * state.baseline:
            if self.environment.rank == 0:
                text = "step %d: %s measures again: %.1f ms a step, %.1f after the last choice"
                logger.info(text, step.number, self.name, 1e3 * seconds, 1e3 * state.baseline)
            self._observe_from(step.number + 1)
        return False

    # -- state -------------------------------------------------------------------------------------------------

    def own_state(self) -> dict[str, dict[str, Floats]]:
        """Returns the times that this rank has noted, under the first layer's name since they belong to no layer."""
        return {"times": {self._names[0]: np.concatenate(self._rows)}} if self._rows else {}

    def resume(self, saved: AutoState, own: Mapping[str, Mapping[str, Any]]) -> bool:
        """Restores the choice; with another number of ranks or other layers, all is measured again.

        A saved choice that is not among the choices is replaced by the first one.
        """
        forms, names, places = self._forms, self._names, saved.position or {}
        same = saved.world == self.environment.world and saved.choice in forms
        same &= len(saved.predicted) in (0, len(forms)) and places.keys() in (set(), set(names))
        position = {name: places.get(name, -1) for name in names} if places else None
        before = saved.before if saved.before and saved.before[0] in forms else None
        self._state = replace(saved, world=self.environment.world, position=position, before=before)
        self._choose(forms.index(saved.choice) if saved.choice in forms else 0)
        self.reason, self._ended = saved.reason, None
        times = np.array(own.get("times", {}).get(names[0], np.zeros(0)), dtype=np.float32)
        width = 1 if saved.phase is Phase.CRUISE else 2 + max(saved.buckets, 0)
        self._rows = list(times[: len(times) // width * width].reshape(-1, width))
        if not self._has_a_choice:
            self._state.phase = Phase.IDLE
            return False
        if same and self._state.is_complete((self.environment.world, self._width)):
            return True
        self._state.predicted = []
        self._observe_from(_SOON)
        return False


@dataclass(frozen=True)
class Auto(Controller):
    """Chooses the least compression that hides the communication; on a network that is fast enough, none.

    A run starts with the first choice. After its first steps, ``warmup_steps`` steps are observed to learn when
    gradients become ready and how long a step computes; the slowest rank counts. Meanwhile another thread times the
    codec of each choice. Then the link is measured, and its rate is fitted so that the step predicted for the current
    choice takes as long as the measured one. With that link a step is predicted for each choice
    (:mod:`gradcomp.control.forecast`). Candidates are the choices up to the first whose exposed communication is at
    most ``hidden`` of the computing time, or all choices if nothing hides the communication; Auto takes the candidate
    with the shortest predicted step. A choice that compresses more must shorten the predicted step by more than 2%.

    A prediction cannot include everything, such as a busy core, so the steps that follow a change are compared with
    those before it. If their median is longer than before a change to more compression, or longer by more than
    ``hidden`` + 2% than before a change to less compression, the previous choice returns. Every ``check_every`` steps
    ranks compare their step times with those after the decision. If the mean over ranks of the median differs by more
    than the fraction ``drift``, steps and link are measured again and the choice is made again.

    A choice applies to every controlled layer; excluded layers stay exact.

    Args:
        choices: compressors or string forms, from least to most compression. The default ends at 4 bits, at which the
            accuracy of training without compression is recovered on all models of Markov et al. 2024 and Markov
            2024; choose more only where you know that it does no harm.
        warmup_steps: steps to observe before a choice.
        hidden: fraction of the computing time that exposed communication may take.
        drift: relative change of the step time after which the choice is made again.
        check_every: steps between two comparisons of the step time.

    Wire: for each decision, one probe of the link between steps (54 messages of 1 KiB and 6 of 1 MiB a rank), a sum
    over ranks of N (2 + buckets + 2 choices) float64, and one of 4 + choices; one float64 for each comparison of step
    times.

    State: a few numbers, and the times of the steps that are being observed.

    Errors: ConfigError for an empty list, for a choice that is unknown, repeated, has a schedule, momentum or clipping,
    for numbers that are not positive, and for layers whose own compressor has momentum or clipping.
    """

    name: ClassVar[str] = "auto"

    choices: Sequence[Compressor | str] = AUTO_CHOICES
    warmup_steps: int = 10
    hidden: float = 0.05
    drift: float = 0.3
    check_every: int = 100

    def __post_init__(self) -> None:
        if isinstance(self.choices, str | Compressor) or not self.choices:
            raise ConfigError(
                f"choices must be one or more compressors or string forms, got {self.choices!r}"
            )
        resolved = tuple(map(resolve, self.choices))
        if len(set(resolved)) < len(resolved):
            raise ConfigError(f"a choice is given twice: {', '.join(c.to_string() for c in resolved)}")
        for choice in resolved:
            if choice.changes or choice.traits.preconditions:
                reason = "it has a schedule, momentum or clipping"
                raise ConfigError(f"{choice.to_string()} cannot be one of several choices: {reason}")
        object.__setattr__(self, "choices", resolved)
        for name in ("warmup_steps", "check_every"):
            check_whole(name, getattr(self, name))
        for name in ("hidden", "drift"):
            check_positive(name, getattr(self, name))

    @property
    def by_times(self) -> bool:
        return True

    def begin(self, environment: Environment) -> AutoRun:
        own = [c for c in environment.compressors if c is not None and c.traits.preconditions]
        if own:
            raise ConfigError(
                f"{own[0].to_string()} has momentum or clipping, which auto would drop when it replaces the compressor"
            )
        return AutoRun(self, environment)
