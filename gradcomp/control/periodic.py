"""The base of controllers that decide periodically, from the gradients of a period."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from time import thread_time
from typing import ClassVar, TypeVar

import numpy as np

from gradcomp.compress.checks import check_whole
from gradcomp.control.base import Controller, ControllerRun, Doubles, Environment, Mask, Numbers, Probe, Step
from gradcomp.control.candidates import CandidateLevels, Candidates, crowded_ends, goes_on, make_candidates
from gradcomp.control.measurement import (
    COLUMNS,
    Gathering,
    Held,
    Sampled,
    Share,
    Windowed,
    measure,
    share_out,
)
from gradcomp.control.observations import Decision, PeriodObservations
from gradcomp.control.phased import Phase, PhasedRun, PhasedState
from gradcomp.control.sensitivity import ENDLESS, LossTable
from gradcomp.core.errors import ConfigError, StateError
from gradcomp.core.plan import Level
from gradcomp.core.run_lines import PERIOD, Account, Sample
from gradcomp.core.vectors import Floats, Vector
from gradcomp.kernels.codec import Table

logger = logging.getLogger("gradcomp")

T = TypeVar("T")

#: Number of saved columns before those of the errors: COLUMNS, wire, sent, position. The finite value that stands for
#: infinity.
_SAVED, _ENDLESS = COLUMNS + 3, 1e300


@dataclass
class SavedObservations:
    """The table that rank 0 decides from, one row per layer or block, in numbers that JSON can hold."""

    step: int
    table: Doubles
    rate_fall: float | None = None
    losses: Doubles | None = None


@dataclass
class PeriodicState(PhasedState):
    """The saved state: ``choices`` has the family and level of each layer.

    ``sent``: bytes of this period, in the order of ``choices``. ``rate``: the learning rate of the last step;
    ``rate_before``: its mean over ranks when tables were last shared. ``wide``: ranges have been widened. ``columns``:
    of the rows that ranks hold of single steps or of losses; None if they hold sums only.
    """

    choices: dict[str, tuple[str, Level]]
    memory: Doubles
    sent: Doubles
    seen: SavedObservations | None = None
    rate: float | None = None
    rate_before: float | None = None
    wide: bool | None = None
    columns: int | None = None


class PeriodicRun(PhasedRun[PeriodicState]):
    """Gathers until the period ends; then measures, shares, decides and announces while the next period gathers."""

    PHASES = (Phase.GATHER, Phase.MEASURE, Phase.SHARE, Phase.DECIDE, Phase.ANNOUNCE)

    def __init__(self, controller: Periodic, environment: Environment) -> None:
        self.controller = controller
        self.candidates = candidates = controller.candidate_levels(environment)
        self._numbers = {environment.layers[i].name: i for i in candidates.items}
        memory, sent = controller.begin_memory(candidates), np.zeros(len(self._numbers))
        state = PeriodicState(Phase.GATHER, environment.first_step, {}, memory, sent)
        super().__init__(controller.name, environment, state)
        self.current = candidates.reference.copy()
        self.choose()
        self.choices = {}  # the plan does not change until the first decision
        #: The changes of loss of this rank's layers, if the controller needs them.
        self._losses: LossTable | None = None
        self._gathering = self._gather()
        #: Processor seconds of this rank: summing gradients, measuring, deciding, computing losses.
        self.spent = {"add": 0.0, "measure": 0.0, "decide": 0.0, "probe": 0.0}
        self._wire = np.zeros(len(self._numbers), dtype=np.float32)  # float32, as checkpoints store it
        self._said: set[tuple[str, bool, bool]] = set()
        self._account: Account = ()

    def _gather(self) -> Gathering:
        environment, controller, candidates = self.environment, self.controller, self.candidates
        sizes = {i: environment.layers[i].size for i in candidates.items}
        weights = sizes
        if controller.needs_losses:  # a forward pass for each choice takes longer than anything else
            weights = {i: len(candidates.choices[rows.start]) for i, rows in candidates.items.items()}
        owners = share_out(weights, environment.world)
        kind, cap = Sampled if controller.sampled else Windowed, controller.memory_bytes
        loads = [0] * environment.world
        for layer, rank in owners.items():
            loads[rank] += kind.ELEMENT_BYTES * sizes[layer]
        if cap is not None and max(loads) > cap:
            raise ConfigError(
                f"{controller.name}: {kind.TITLE} take {max(loads)} bytes on a rank, memory_bytes allows "
                f"{cap}; allow more, or exclude large layers"
            )
        own = {name: i for name, i in self._numbers.items() if owners[i] == environment.rank and sizes[i]}
        gathers = set(own.values())
        sizes_here = [sizes[i] if i in gathers else 0 for i in range(len(environment.layers))]
        share = Share(environment, own, sizes_here, self._measure, cap)
        gathering = kind(share, controller.every_steps, controller.sampled or controller.summed)
        self._own = own
        if controller.needs_losses:
            self._losses = LossTable(candidates, own, environment.seed)
        gathering.range_over(candidates, self._width)
        self._state.columns = self._columns(gathering)
        return gathering

    def _columns(self, gathering: Gathering) -> int | None:
        return gathering.columns if self._losses is None else self.candidates.width

    @property
    def _width(self) -> int:
        """Returns the columns of the shared table; the last one counts nonzero elements if they matter."""
        if not self.controller.needs_errors:
            return COLUMNS
        return COLUMNS + self.candidates.width + int(self.candidates.leaves_zeros.any())

    # -- gather ------------------------------------------------------------------------------------------------

    def begin(self, step: int) -> None:
        """Closes the period, with its last accepted step, when it is over, and begins the next one."""
        state = self._state
        if state.phase is Phase.GATHER and step - state.begun >= self.controller.every_steps:
            self._gathering.close()
            if self._losses is not None:
                self._losses.clear()
            state.begun, state.phase = step, Phase.MEASURE
        self._gathering.open(step - state.begun)
        super().begin(step)

    @property
    def accumulates(self) -> bool:
        """Returns true if the period wants this step's gradients."""
        return self._gathering.adding

    @property
    def overdue(self) -> bool:
        """Returns true also while the previous sample is being measured."""
        return self._gathering.overdue or super().overdue

    def accumulate(self, table: Table, layers: Numbers, scale: float) -> None:
        """Gathers the gradients of the layers that this rank owns."""
        self._timed("add", lambda: self._gathering.add(table, layers, scale))

    def _timed(self, what: str, work: Callable[[], T]) -> T:
        began = thread_time()
        result = work()
        self.spent[what] += thread_time() - began
        return result

    def commit(self, present: Mask) -> None:
        self._gathering.commit(present)

    def finish(self, step: Step) -> bool:
        """Counts seconds and bytes, and advances the phase."""
        layers = list(self._numbers.values())
        if not self.environment.deterministic:  # measured times would make saved states differ between runs
            self._wire += step.wire[layers].astype(np.float32)
        self._state.sent += step.sent[layers]
        self._state.rate = step.rate or None
        return super().finish(step)

    # -- measure and share -------------------------------------------------------------------------------------

    @property
    def due(self) -> bool:
        """Returns true if the phase may end now; with ``deterministic`` that is a fixed step after the period."""
        if not self.environment.deterministic:
            return True
        lag = self.controller.lag
        # Tables are shared in the one step between measuring and deciding.
        return self._step >= self._state.begun + (lag if self.phase is Phase.MEASURE else 2 * lag + 1)

    @property
    def ready(self) -> bool:
        """Returns true if this rank's work of the phase is done, and all its losses are measured."""
        return not self.awaits_losses and super().ready

    @property
    def awaits_losses(self) -> bool:
        return self.phase is Phase.MEASURE and self._losses is not None and not self._losses.complete

    def probe(self, losses: Probe) -> None:
        """Measures the next losses of the closed period; the same number on every rank that has some left."""
        if self._losses is not None and self.awaits_losses:
            table, taken, count = self._losses, self._gathering.taken, self.controller.probes_per_step
            self._timed("probe", lambda: table.measure(taken, losses, count))

    def measuring(self) -> Callable[[], Doubles]:
        return self._gathering.measuring()

    def _measure(self, values: Mapping[int, Vector], memory_bytes: int | None) -> Doubles:
        environment = self.environment
        return self._timed(
            "measure",
            lambda: measure(
                self.candidates, values, self._width, environment.seed, environment.device, memory_bytes
            ),
        )

    def row(self, measured: Doubles) -> Doubles:
        """Returns this rank's rows, and its parts of the mean seconds on the wire and of the mean learning rate."""
        changes = np.zeros(0) if self._losses is None else self._losses.table().reshape(-1)
        means = np.append(self._wire, self._state.rate or 0.0) / self.environment.world
        return np.concatenate([measured.reshape(-1), changes, means])

    def receive(self, step: Step, sums: Doubles) -> bool:
        """Stores the table. If it has a NaN, the period is skipped."""
        state, layers, layer_of = self._state, self.candidates.layers, self.candidates.layer_of
        table = sums[: len(layers) * self._width].reshape(len(layers), self._width)
        self._gathering.drop()
        if np.isnan(sums).any() or np.isinf(table[:, :COLUMNS]).any():
            if self.environment.rank == 0:
                logger.warning("%s: statistics are not finite, this period is skipped", self.controller.name)
            state.phase = Phase.GATHER
            return False
        wire, sent = sums[-1 - len(self._wire) : -1][layer_of], state.sent[layer_of]
        about = np.stack([wire, sent, step.position[layers].astype(np.float64)], axis=1)
        losses = np.minimum(table[:, COLUMNS:], _ENDLESS)
        if self.controller.needs_errors:
            losses[:, : self.candidates.width][np.isinf(self.candidates.costs)] = _ENDLESS
        rate, before = float(sums[-1]), state.rate_before
        fall = max(1.0 - rate / before, 0.0) if rate and before else 0.0
        state.rate_before = rate or None
        saved = np.concatenate([table[:, :COLUMNS], about, losses], axis=1)
        changes = None
        if self._losses is not None:
            costs = self.candidates.costs
            changes = sums[table.size : table.size + costs.size].reshape(costs.shape)
        state.seen = SavedObservations(step.number, saved, fall or None, changes)
        self._wire, state.sent = np.zeros_like(self._wire), np.zeros_like(state.sent)
        return True

    # -- decide and apply --------------------------------------------------------------------------------------

    @property
    def observations(self) -> PeriodObservations | None:
        """Returns the observations of a decision in progress, equal on all ranks, or None."""
        seen = self._state.seen
        if seen is None:
            return None
        norm, mean, deviation, wire, sent, position = seen.table[:, :_SAVED].T
        losses, nonzero, width = None, None, self.candidates.width
        if self.controller.needs_errors:
            losses = seen.table[:, _SAVED : _SAVED + width]
            losses = np.where(losses >= _ENDLESS, np.inf, losses)
            nonzero = seen.table[:, -1] ** 2 if seen.table.shape[1] > _SAVED + width else None
        moments = norm, mean, deviation, losses, wire, sent, position.astype(np.int64)
        fall, memory = seen.rate_fall or 0.0, self._state.memory
        changes = seen.losses
        if changes is not None:
            changes = np.where(np.isinf(self.candidates.costs) | (changes >= ENDLESS), np.inf, changes)
        return PeriodObservations(
            seen.step, self.candidates, *moments, self.current, memory, fall, nonzero, changes
        )

    def deciding(self) -> Callable[[], Decision]:
        """Returns the work that applies the controller's rule."""
        observed = self.observations
        assert observed is not None, "tables were shared"
        return lambda: self._timed("decide", lambda: self.controller.decide(observed))

    @property
    def announced(self) -> int:
        """Returns the length of an announcement: a choice per row, and the memory."""
        return len(self.current) + len(self._state.memory)

    def announcement(self, decision: Decision) -> Doubles:
        """Returns the choices, checked to exist, and the memory."""
        limits = [len(choices) for choices in self.candidates.choices]
        good = len(decision.choices) == len(limits) and len(decision.memory) == len(self._state.memory)
        if not good or any(not 0 <= k < n for k, n in zip(decision.choices.tolist(), limits, strict=True)):
            raise StateError(f"{self.name} decided on choices that do not exist: {decision.choices!r}")
        self.reason = decision.reason
        return np.concatenate([decision.choices.astype(np.float64), decision.memory])

    def apply(self, step: Step, sums: Doubles) -> bool:
        """Applies the choices; the next period may then end."""
        state, before, rows = self._state, self._state.choices, len(self.current)
        self.current = sums[:rows].astype(np.int64)
        self._account = self._samples(step.number) if self.environment.rank == 0 else ()
        state.memory, state.seen, state.phase = sums[rows:].copy(), None, Phase.GATHER
        if self.controller.tells_ends:
            self._look_at_ends()
        self.choose()
        return before != state.choices

    def _samples(self, step: int) -> Account:
        """Returns norm and relative error of the layers that had a gradient, under the current choices."""
        observed, of = self.observations, self.candidates.layers
        assert observed is not None, "a decision was made from it"
        squares = np.bincount(of, observed.norm**2)
        lost = np.full(len(squares), np.nan)
        if observed.errors is not None:
            lost = np.bincount(of, observed.errors[np.arange(len(of)), self.current] ** 2)
        shares = np.sqrt(np.divide(lost, squares, out=np.full(len(squares), np.nan), where=squares > 0))
        return tuple(
            Sample(step, layer, float(f"{np.sqrt(squares[layer]):.4g}"), None, error, PERIOD)
            for layer in np.flatnonzero(squares).tolist()
            for error in [round(float(shares[layer]), 5) if np.isfinite(shares[layer]) else None]
        )

    def account(self) -> Account:
        """Returns the errors of the last decision, once."""
        given, self._account = self._account, ()
        return given

    def _look_at_ends(self) -> None:
        """Widens ranges that are too short, if possible. All ranks do the same, since they have the same choices."""
        ends = crowded_ends(self.candidates, self.current)
        wider = self._wider if ends and not self._state.wide else None
        widens = wider is not None and any(goes_on(end, self.candidates, wider) for end in ends)
        for end in ends:
            said = (end.family, end.low, widens)
            if said not in self._said and self.environment.rank == 0:
                then = "ranges are widened" if widens else "levels= may go further"
                logger.info("%s: %s: %s", self.name, end.words, then)
            self._said.add(said)
        if widens:
            self._range_over(wide=True)

    @cached_property
    def _wider(self) -> CandidateLevels | None:
        return self.controller.wider_levels(self.environment)

    def _range_over(self, wide: bool) -> None:
        """Switches to wide ranges or back, keeping the current choices that the new ranges have."""
        wider = self._wider if wide else None
        choices, before = self.candidates.choices, self.current.tolist()
        self.candidates = wider or self.controller.candidate_levels(self.environment)
        self._state.wide = True if wider else None
        for row, k in enumerate(before):
            self._keep(row, choices[row][k].family_string(), choices[row][k].level)
        self._gathering.range_over(self.candidates, self._width)
        if self._losses is not None:
            self._losses = LossTable(self.candidates, self._own, self.environment.seed)
        self._state.columns = self._columns(self._gathering)

    def _keep(self, row: int, family: str, level: Level) -> None:
        """Makes this the current choice of a row if it is one of its choices, else the reference."""
        found = self.candidates.find(row, family, level)
        self.current[row] = self.candidates.reference[row] if found is None else found

    def choose(self) -> None:
        """Sets :attr:`choices` to the current ones."""
        self.choices = self.candidates.chosen(self.current)
        self._state.choices = {
            name: (self.choices[i].family_string(), self.choices[i].level)
            for name, i in self._numbers.items()
        }

    # -- state -------------------------------------------------------------------------------------------------

    def own_state(self) -> dict[str, dict[str, Floats]]:
        """Returns the gathered gradients, and the seconds on the wire."""
        wire = {name: self._wire[row : row + 1].copy() for row, name in enumerate(self._numbers)}
        losses = {} if self._losses is None else {"losses": self._losses.state()}
        return {**self._gathering.state(), "wire": wire, **losses}

    def resume(self, saved: PeriodicState, own: Held) -> bool:
        """Restores the state; layers that are new, or whose choice is not offered, use their reference."""
        if len(saved.sent) != len(saved.choices):
            raise StateError(f"not a state of {self.name}: bytes of {len(saved.sent)} layers")
        # With other blocks a memory has another length, on all ranks.
        same = len(saved.memory) == len(self._state.memory)
        names = self._numbers
        sent = dict(zip(saved.choices, saved.sent.tolist(), strict=True))
        self._state = replace(
            self._state,
            phase=Phase.GATHER,
            begun=saved.begun,
            memory=saved.memory if same else self.controller.begin_memory(self.candidates),
            sent=np.array([sent.get(name, 0.0) for name in names]),
            rate=saved.rate,
            rate_before=saved.rate_before,
        )
        if bool(saved.wide) != bool(self._state.wide):
            self._range_over(bool(saved.wide))
        for at, (name, layer) in enumerate(names.items()):
            for row in self.candidates.items[layer]:
                self._keep(row, *saved.choices.get(name, ("", None)))
            self._wire[at] = own.get("wire", {}).get(name, self._wire[at : at + 1]).reshape(-1)[0]
        self.choose()
        gathered = self._gathering.resume(own)
        if self._losses is not None:
            self._losses.resume(own.get("losses", {}))
            # Losses that do not fit are measured again; a table that is about to be shared must have all of them.
            gathered &= saved.phase is Phase.MEASURE or self._losses.complete
        whole = same and saved.choices.keys() == names.keys()
        if saved.phase in (Phase.DECIDE, Phase.ANNOUNCE):
            shape = (len(self.current), _SAVED + self._width - COLUMNS)
            seen = saved.seen
            whole &= seen is not None and seen.table.shape == shape
            if seen is not None and self._losses is not None:
                whole &= seen.losses is not None and seen.losses.shape == self.candidates.costs.shape
        else:
            # Columns are compared too, so that all ranks agree: a rank without layers has nothing that might not fit.
            whole &= saved.phase is Phase.GATHER or (gathered and saved.columns == self._state.columns)
        if not whole:
            self._gathering.drop()  # only the current period continues
        self._state.seen = saved.seen if whole else None
        return whole


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

    State: 8 bytes per element of the model, divided among the ranks, and as many again while they are measured, or 4
    with ``samples``; in addition what measuring takes, at least as much as the largest layer. ``memory_bytes`` limits
    all of them on every rank.

    Errors: ConfigError at the start if the gathered values do not fit into ``memory_bytes``, and if both ``window`` and
    ``samples`` are given.
    """

    #: True if the log reports that most elements are at an end of their range.
    tells_ends: ClassVar[bool] = False

    every_steps: int
    window: int | None = field(default=None, kw_only=True)
    samples: int | None = field(default=None, kw_only=True)
    memory_bytes: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        check_whole("every_steps", self.every_steps)
        for name in ("window", "samples", "memory_bytes"):
            check_whole(name, getattr(self, name), or_none=True)
        if self.window is not None and self.samples is not None:
            raise ConfigError(
                f"window={self.window} adds gradients up and samples={self.samples} measures single steps: give one"
            )

    @property
    def sampled(self) -> int:
        """Returns the number of single steps that are measured in a period; 0 if gradients are summed."""
        return self.samples or 0

    @property
    def summed(self) -> int:
        """Returns the number of last steps of a period whose gradients are summed, unless steps are sampled."""
        return self.window or self.every_steps

    @property
    def probes_per_step(self) -> int:
        """Returns the number of losses that a rank measures after a step, if any are needed."""
        return 1

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
        return make_candidates(environment, self.candidates())

    def wider_levels(self, environment: Environment) -> CandidateLevels | None:
        """Returns wider choices, which replace these once most elements are at an end of their range.

        Controllers that keep their ranges return None.
        """
        return None

    def begin_memory(self, candidates: CandidateLevels) -> Doubles:
        """Returns the ``memory`` of the first decision; its length never changes."""
        return np.zeros(0)

    @abstractmethod
    def decide(self, observed: PeriodObservations) -> Decision:
        """Chooses. A pure function that runs on rank 0 only, on a background thread."""

    def begin(self, environment: Environment) -> ControllerRun:
        return PeriodicRun(self, environment)
