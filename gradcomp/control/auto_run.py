"""The run of Auto: measures steps, codecs and the link, chooses from them, and then compares step times."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

import numpy as np

from gradcomp.compress import Compressor, Identity
from gradcomp.compress.policy import EXACT
from gradcomp.control import rates
from gradcomp.control.auto_state import AutoState, Limits, explain, median, names_of
from gradcomp.control.base import Doubles, Environment, Step
from gradcomp.control.forecast import MARGIN, Observed, Rates, decide, slower
from gradcomp.control.phased import Phase, PhasedRun
from gradcomp.core.plan import Assignment, Plan
from gradcomp.core.vectors import Floats
from gradcomp.reduce.model import Network

logger = logging.getLogger("gradcomp")

#: The first steps of a run allocate memory, fix the order of exchange buckets and compare parameters, so their times
#: are not typical.
SETTLING_STEPS = 6
#: Stands for the step in which an observation begins: it begins SETTLING_STEPS after the next step.
_SOON = -1
#: After a change of plan, the reports of this many steps still describe the previous plan.
_BEHIND_STEPS = 3


class AutoRun(PhasedRun[AutoState]):
    """Observes, probes, shares, decides, announces, and compares step times. ``clock`` returns seconds."""

    PHASES = (Phase.IDLE, Phase.OBSERVE, Phase.PROBE, Phase.SHARE, Phase.DECIDE, Phase.ANNOUNCE, Phase.CRUISE)

    def __init__(
        self, name: str, compressors: Sequence[Compressor], limits: Limits, environment: Environment
    ) -> None:
        self.compressors, self.limits = tuple(compressors), limits
        self._forms = [compressor.to_string() for compressor in compressors]
        self._names = [layer.name for layer in environment.layers]
        self._has_a_choice = bool(environment.controlled) and environment.world > 1
        phase = Phase.OBSERVE if self._has_a_choice else Phase.IDLE
        begun = environment.first_step + SETTLING_STEPS  # the first observed step
        nothing: tuple[Any, ...] = (0, [], "", None, None, None, 0, None, None)
        state = AutoState(phase, begun, environment.world, self._forms[0], *nothing)
        super().__init__(name, environment, state)
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
        rows = list(super().plan(before).assignments)
        exact = EXACT if self.compressors[self.current].traits.reduces else Identity()
        replaced = (EXACT.family_string(), Identity().family_string())
        for i, layer in enumerate(self.environment.layers):
            if i not in self.choices and layer.dtype != "float64" and rows[i].compressor in replaced:
                rows[i] = Assignment(layer.name, exact.family_string(), exact.level)
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
        return self.phase is not Phase.OBSERVE or self._step >= self._state.begun + self.limits.warmup_steps

    def measuring(self) -> Callable[[], list[Rates]]:
        """Returns the work that times the codec of every choice."""
        compressors = self.compressors
        return lambda: [rates.measure_rates(c) for c in compressors]

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
        if known and step.number < state.begun + self.limits.warmup_steps:
            opened = np.float64(self._between)
            times = np.concatenate([[step.seconds, opened], opened + step.ready])
            self._rows.append(times.astype(np.float32))

    def _observe_from(self, begun: int) -> None:
        state = self._state
        state.phase, state.begun, state.position, state.table = Phase.OBSERVE, begun, None, None
        self._rows = []

    def hear(self, network: Network) -> None:
        self._state.network = network
        super().hear(network)

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
        speeds = state.table[:, columns:].min(axis=0).reshape(-1, 2).tolist()
        observed = Observed(
            list(state.position.values()),
            state.table[:, 1:columns].max(axis=0).tolist(),
            [Rates(*pair) for pair in speeds],
            state.network,
            self._step_seconds,
        )
        current, hidden = self.current, self.limits.hidden
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

    def announcement(self, decision: list[float]) -> Doubles:
        return np.array(decision)

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
        since = step - self._state.begun - self.limits.warmup_steps
        return since >= 0 and since % self.limits.check_every == 0

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
            if seconds > limit * (1 if choice < now else 1 + self.limits.hidden + MARGIN):
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
        elif abs(seconds - state.baseline) > self.limits.drift * state.baseline:
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
