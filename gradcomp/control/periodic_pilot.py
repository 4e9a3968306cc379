"""A periodic controller at work: gather, measure, share, decide, announce, in the same steps on all ranks."""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from time import thread_time
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from gradcomp.compress import Compressor
from gradcomp.compress.errors import errors
from gradcomp.control.accumulators import Accumulators, share_out
from gradcomp.control.base import Doubles, Pilot, Setting, Step
from gradcomp.control.seen import Decision, Numbers, Seen
from gradcomp.core.errors import ConfigError, StateError
from gradcomp.core.vectors import Floats, HostVector, Vector
from gradcomp.kernels import bodies, selection
from gradcomp.kernels.codec import Table
from gradcomp.kernels.segments import SEGMENT

if TYPE_CHECKING:
    from gradcomp.control.periodic import Periodic

logger = logging.getLogger("gradcomp")

T = TypeVar("T")

#: Columns of the table that ranks add up, before those of the errors: norm, mean, deviation.
_COLUMNS = 3

#: Columns of a saved :class:`Seen`, before those of the errors: these, wire, sent, position; what stands for infinity.
_SEEN, _ENDLESS = 6, 1e300


class Phase(enum.Enum):
    """What all ranks are at."""

    GATHER = "gradients add up until the period ends"
    MEASURE = "every rank measures its layers"
    SHARE = "the tables are added over ranks in this step"
    DECIDE = "rank 0 decides"
    ANNOUNCE = "rank 0's decision is added over ranks in this step"


class PeriodicPilot(Pilot):
    """Gather, measure, share, decide, announce; the phase changes in the same step on all ranks."""

    def __init__(self, controller: Periodic, setting: Setting) -> None:
        super().__init__(controller.name, setting)
        self.controller = controller
        self.menu = controller.menu(setting)
        self.phase = Phase.GATHER
        self.begun = setting.first_step  # the step in which the period that adds up began
        self.current = self.menu.reference.copy()
        self.memory = controller.begin_memory(self.menu)
        self._has_errors = controller.needs_errors
        self._columns = _COLUMNS + (self.menu.width if self._has_errors else 0)
        sizes = {int(i): s.size for i, s in zip(self.menu.layers, self.menu.specs, strict=True)}
        owners = share_out(sizes, setting.world)
        self._own = [i for i in sizes if owners[i] == setting.rank and sizes[i]]
        self._check_memory(sizes, owners)
        own = [sizes[i] if i in self._own else 0 for i in range(len(setting.layers))]
        self._sums = Accumulators(own, setting.zeros)
        self._taken: dict[int, Vector] = {}  # what is being measured
        self._seen: Seen | None = None
        self._work: Future[Any] | None = None
        self._adding = False
        self._step = 0
        #: Processor seconds of this rank: adding gradients up, measuring, deciding.
        self.spent = {"add": 0.0, "measure": 0.0, "decide": 0.0}
        self._wire = np.zeros(len(setting.layers), dtype=np.float32)  # as it is saved
        self._sent = np.zeros(len(setting.layers))

    def _check_memory(self, sizes: Mapping[int, int], owners: Mapping[int, int]) -> None:
        cap = self.controller.memory_bytes
        loads = [0] * self.setting.world
        for layer, rank in owners.items():
            loads[rank] += 8 * sizes[layer]
        if cap is not None and max(loads) > cap:
            raise ConfigError(
                f"{self.controller.name}: sums of gradients take {max(loads)} bytes on a rank, memory_bytes allows "
                f"{cap}; allow more, or exclude large layers"
            )

    @property
    def nbytes(self) -> int:
        """The sums, and those that are being measured."""
        return self._sums.nbytes * (2 if self._taken else 1)

    # -- while a step runs -------------------------------------------------------------------------------------

    def begin(self, step: int) -> None:
        """Close the period when its time has come, and begin the next; sums include the last accepted step."""
        self._step = step
        every = self.controller.every_steps
        if self.phase is Phase.GATHER and step - self.begun >= every:
            self._taken = self._sums.take()
            self.begun = step
            self.phase = Phase.MEASURE
            self._start()
        end = self.begun + every  # late work does not make a period longer
        self._adding = max(self.begun, end - (self.controller.window or every)) <= step < end

    def _start(self) -> None:
        """The background work that the phase needs, if it needs any on this rank."""
        if self.phase in (Phase.MEASURE, Phase.SHARE):
            taken, cap = self._taken, self.controller.memory_bytes
            left = None if cap is None else max(cap - self._sums.nbytes, 0)
            self._work = self.setting.background(
                lambda: self._timed("measure", lambda: self._measure(taken, left))
            )
        elif self.phase in (Phase.DECIDE, Phase.ANNOUNCE) and self.setting.rank == 0:
            seen = self._seen
            assert seen is not None, "tables were shared"
            self._work = self.setting.background(
                lambda: self._timed("decide", lambda: self.controller.decide(seen))
            )

    @property
    def ready(self) -> bool:
        """Whether this rank's part of the phase is done. Raises what the work raised."""
        if not self._due:
            return False
        if self._work is not None and not self._work.done():
            return False
        if self._work is not None:
            self._work.result()
        return self.phase in (Phase.MEASURE, Phase.DECIDE)

    @property
    def _due(self) -> bool:
        """Whether the phase may end with this step: with ``deterministic`` a number of steps after the period did."""
        if not self.setting.deterministic:
            return True
        lag = self.controller.lag
        # One step lies between the two: that in which tables are shared.
        return self._step >= self.begun + (lag if self.phase is Phase.MEASURE else 2 * lag + 1)

    @property
    def overdue(self) -> bool:
        """With ``deterministic``: the phase ends with this step, and this rank's part of it is not done."""
        waits = self.setting.deterministic and self.phase in (Phase.MEASURE, Phase.DECIDE) and self._due
        return waits and self._work is not None and not self._work.done()

    @property
    def accumulates(self) -> bool:
        """In the window."""
        return self._adding

    def accumulate(self, table: Table, layers: Numbers, scale: float) -> None:
        """Add the gradients of layers that are this rank's."""
        self._timed("add", lambda: self._sums.add(table, layers, scale))

    def _timed(self, what: str, work: Callable[[], T]) -> T:
        began = thread_time()
        result = work()
        self.spent[what] += thread_time() - began
        return result

    def commit(self, present: npt.NDArray[np.bool_]) -> None:
        """Accept the sums."""
        if self._adding:
            self._sums.commit(present)

    def contribution(self, step: int) -> Doubles | None:
        """In two phases: this rank's rows of the table, and rank 0's decision."""
        if self.phase is Phase.SHARE:
            assert self._work is not None, "it was done when this rank voted"
            wire = self._wire[self.menu.layers].astype(np.float64) / self.setting.world
            return np.concatenate([self._work.result().reshape(-1), wire])
        if self.phase is Phase.ANNOUNCE:
            if self.setting.rank:
                return np.zeros(len(self.current) + len(self.memory))
            assert self._work is not None, "it was done when this rank voted"
            decision = self._work.result()
            self._check(decision)
            return np.concatenate([decision.choices.astype(np.float64), decision.memory])
        return None

    def finish(self, step: Step) -> bool:
        """Go on to the next phase, if all ranks can."""
        if not self.setting.deterministic:  # no decision reads it then, and what is saved repeats
            self._wire += step.wire.astype(np.float32)
        self._sent += step.sent
        if self.phase is Phase.SHARE:
            assert step.sums is not None, "all ranks contributed"
            self._read_table(step, step.sums)
        elif self.phase is Phase.ANNOUNCE:
            assert step.sums is not None, "all ranks contributed"
            return self._take_choice(step.sums)
        elif step.agreed and self.phase in (Phase.MEASURE, Phase.DECIDE):
            self.phase = Phase.SHARE if self.phase is Phase.MEASURE else Phase.ANNOUNCE
        return False

    # -- what a period comes to --------------------------------------------------------------------------------

    def _measure(self, taken: Mapping[int, Vector], memory_bytes: int | None) -> Doubles:
        """This rank's rows of the table: zeros for the layers of others."""
        table = np.zeros((len(self.menu.layers), self._columns))
        rows = [row for row, number in enumerate(self.menu.layers.tolist()) if number in taken]
        measured = [taken[int(self.menu.layers[row])] for row in rows]
        for row, values, (mean, square) in zip(rows, measured, _moments(measured).tolist(), strict=True):
            deviation = np.sqrt(max(square / values.size - mean * mean, 0.0))
            table[row, :_COLUMNS] = np.sqrt(square), mean, deviation
            if self._has_errors:
                choices, spec = self.menu.choices[row], self.menu.specs[row]
                table[row, _COLUMNS : _COLUMNS + len(choices)] = errors(
                    choices, spec, values, self.setting.seed, memory_bytes=memory_bytes
                )
        return table

    def _read_table(self, step: Step, sums: Doubles) -> None:
        """The same on all ranks. A table with a NaN in it is not used: the period was in vain."""
        rows = len(self.menu.layers)
        table = sums[: rows * self._columns].reshape(rows, self._columns)
        self._taken = {}
        self._work = None
        if np.isnan(sums).any() or np.isinf(table[:, :_COLUMNS]).any():
            if self.setting.rank == 0:
                logger.warning("%s: statistics are not finite, this period is skipped", self.controller.name)
            self.phase = Phase.GATHER
            return
        layers = self.menu.layers
        about = [sums[rows * self._columns :], self._sent[layers], step.position[layers].astype(np.float64)]
        self._seen = self._see(
            step.number,
            [*table[:, :_COLUMNS].T, *about],
            np.where(np.isinf(self.menu.costs), np.inf, table[:, _COLUMNS:]) if self._has_errors else None,
        )
        self._wire, self._sent = np.zeros_like(self._wire), np.zeros_like(self._sent)
        self.phase = Phase.DECIDE
        self._start()

    def _check(self, decision: Decision) -> None:
        limits = [len(choices) for choices in self.menu.choices]
        good = len(decision.choices) == len(limits) and len(decision.memory) == len(self.memory)
        if not good or any(not 0 <= k < n for k, n in zip(decision.choices.tolist(), limits, strict=True)):
            raise StateError(
                f"{self.controller.name} decided on choices that do not exist: {decision.choices!r}"
            )
        self.reason = decision.reason

    def _take_choice(self, sums: Doubles) -> bool:
        rows = len(self.current)
        before = self.current
        self.current = sums[:rows].astype(np.int64)
        self.memory = sums[rows:].copy()
        self._work = None
        self._seen = None
        self.choose()
        self.phase = Phase.GATHER
        return not np.array_equal(before, self.current)

    def choose(self) -> None:
        """Let :attr:`choices` be those in force."""
        self.choices = {
            number: self.menu.choices[row][int(self.current[row])]
            for row, number in enumerate(self.menu.layers.tolist())
        }

    # -- state -------------------------------------------------------------------------------------------------

    def shared_state(self) -> dict[str, Any]:
        """Phase, period, choices and memory; while rank 0 decides, also what it decides from."""
        names = [spec.name for spec in self.menu.specs]
        state: dict[str, Any] = {
            "phase": self.phase.name,
            "begun": self.begun,
            "choices": {
                name: [choice.family_string(), choice.level]
                for name, choice in zip(names, self._chosen(), strict=True)
            },
            "memory": self.memory.tolist(),
            "sent": self._sent[self.menu.layers].tolist(),
        }
        if self._seen is not None:
            state["seen"] = {"step": self._seen.step, "table": _to_table(self._seen).tolist()}
        return state

    def _chosen(self) -> list[Compressor]:
        return [choices[k] for choices, k in zip(self.menu.choices, self.current.tolist(), strict=True)]

    def own_state(self) -> dict[str, dict[str, Floats]]:
        """The sums, and those that are being measured."""
        names = {int(n): s.name for n, s in zip(self.menu.layers, self.menu.specs, strict=True)}
        sums = {names[i]: self._sums.value(i).copy() for i in self._own}
        taken = {names[i]: values.read().copy() for i, values in self._taken.items()}
        wire = {names[i]: self._wire[i : i + 1].copy() for i in names}
        return {"sums": sums, "wire": wire, **({"taken": taken} if taken else {})}

    def restore(self, shared: Mapping[str, Any], own: Mapping[str, Mapping[str, Any]]) -> None:
        """Go on in the phase that was saved; its background work begins again.

        Choices that this controller does not offer, and layers that are new, take their reference.
        """
        try:
            phase, begun = Phase[shared["phase"]], int(shared["begun"])
            memory = np.array(shared["memory"], dtype=np.float64)
            chosen = {str(name): (str(pair[0]), pair[1]) for name, pair in shared["choices"].items()}
            seen, sent = shared.get("seen"), dict(zip(chosen, map(float, shared["sent"]), strict=True))
            table = None if seen is None else np.array(seen["table"], dtype=np.float64)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise StateError(f"not a state of {self.controller.name}: {error!r}") from error
        self.begun = begun
        same = len(memory) == len(self.memory)
        self.memory = memory if same else self.controller.begin_memory(self.menu)
        for row, spec in enumerate(self.menu.specs):
            found = self.menu.find(row, *chosen[spec.name]) if spec.name in chosen else None
            self.current[row] = self.menu.reference[row] if found is None else found
        self.choose()
        names = {
            spec.name: int(number) for number, spec in zip(self.menu.layers, self.menu.specs, strict=True)
        }
        for kind in ("sums", "taken"):
            self._load(kind, names, own.get(kind, {}))
        for name, number in names.items():
            self._sent[number] = sent.get(name, 0.0)
            if name in own.get("wire", {}):
                self._wire[number] = own["wire"][name].reshape(-1)[0]
        width = _SEEN + (self.menu.width if self._has_errors else 0)
        whole = same and chosen.keys() == names.keys()
        if phase is Phase.DECIDE or phase is Phase.ANNOUNCE:
            whole &= table is not None and table.shape == (len(names), width)
        else:
            whole &= phase is Phase.GATHER or all(i in self._taken for i in self._own)
        if not whole:
            self._taken = {}
            return  # the period that has begun goes on
        self.phase = phase
        if table is not None:
            self._seen = self._from_table(int(shared["seen"]["step"]), table)
        self._start()
        if phase in (Phase.SHARE, Phase.ANNOUNCE) and self._work is not None:
            self._work.exception()  # what is due in the next step is waited for

    def _load(self, kind: str, names: Mapping[str, int], saved: Mapping[str, Any]) -> None:
        for name, value in saved.items():
            layer = names.get(name)
            if layer not in self._own or value.size != self._sums.value(layer).size:
                continue
            if kind == "sums":
                self._sums.set(layer, value.reshape(-1))
            else:
                self._taken[layer] = HostVector(np.array(value, dtype=np.float32).reshape(-1))

    def _from_table(self, step: int, table: Doubles) -> Seen:
        losses = np.where(table[:, _SEEN:] >= _ENDLESS, np.inf, table[:, _SEEN:])
        return self._see(step, list(table[:, :_SEEN].T), losses if self._has_errors else None)

    def _see(self, step: int, columns: Sequence[Doubles], losses: Doubles | None) -> Seen:
        norm, mean, deviation, wire, sent, position = columns
        return Seen(
            step,
            self.menu,
            norm,
            mean,
            deviation,
            losses,
            wire,
            sent,
            position.astype(np.int64),
            self.current,
            self.memory,
        )


def _to_table(seen: Seen) -> Doubles:
    """One row per layer; numbers that JSON can hold."""
    columns = [seen.norm, seen.mean, seen.deviation, seen.wire, seen.sent, seen.position.astype(np.float64)]
    losses = np.zeros((len(seen.norm), 0)) if seen.errors is None else np.minimum(seen.errors, _ENDLESS)
    return np.concatenate([np.stack(columns, axis=1), losses], axis=1)


def _moments(vectors: Sequence[Vector]) -> Doubles:
    """Mean and sum of squares of each, where they lie."""
    table = np.zeros(len(vectors), dtype=SEGMENT)
    table["gradient"] = [vector.address for vector in vectors]
    table["length"] = [vector.size for vector in vectors]
    device = bodies.on_device(vectors[0].address) if vectors else None
    if device is not None:
        found: Doubles = device.moments(table) / np.stack([table["length"], np.ones(len(table))], axis=1)
        return found
    squares = np.zeros(len(vectors))
    selection.squares(table, squares)
    means = np.array([vector.read().mean(dtype=np.float64) for vector in vectors])
    return np.stack([means, squares], axis=1)
