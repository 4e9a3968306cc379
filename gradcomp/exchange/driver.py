"""The step driver takes a step through its life under every framework, and computes means of row-sparse gradients."""

from __future__ import annotations

import enum
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from gradcomp.core.errors import GradcompError, StateError, WireFormatError
from gradcomp.exchange.arrivals import Addresses, Submission
from gradcomp.exchange.checkpoint_manager import CheckpointManager
from gradcomp.exchange.exchanger import Exchanger
from gradcomp.exchange.fingerprint import DeferredFingerprint, Digests
from gradcomp.exchange.preemption import Preemption
from gradcomp.exchange.settings import Listener
from gradcomp.exchange.step import StepResult
from gradcomp.exchange.waiting import Number
from gradcomp.reduce.header import DISCARDED, KEPT

Array = npt.NDArray[Any]
#: Row numbers, int64, ascending and distinct, and the values of these rows.
Rows = tuple[npt.NDArray[np.int64], Array]


class Phase(enum.Enum):
    """Names the phases in a step's life."""

    IDLE = "no step has begun"
    OPEN = "a step is open"
    FLUSHED = "every gradient of the step was handed in"
    DONE = "the means of the step are there, neither applied nor thrown away"
    COMMITTED = "the last step was accepted"
    DISCARDED = "the last step was thrown away"
    RETIRED = "another exchange has the layers"


class Verb(enum.Enum):
    """The operations on a step."""

    OPEN = "open a step"
    SUBMIT = "submit a gradient"
    FLUSH = "flush the step"
    WAIT = "wait for the means"
    COMMIT = "accept the step"
    KEEP = "keep the means to add to them"
    REFUSE = "end a step that is not finite"
    DISCARD = "throw the means away"
    AMEND = "correct what became of the last step"
    RETIRE = "leave the layers to another exchange"


#: Phases in which the state may be read and replaced, with nothing under way.
BETWEEN_STEPS = {phase: phase for phase in (Phase.IDLE, Phase.COMMITTED, Phase.DISCARDED)}

#: The next phase for each verb and each phase in which it is valid; in any other phase it raises StateError.
TRANSITIONS: Mapping[Verb, Mapping[Phase, Phase]] = {
    Verb.OPEN: dict.fromkeys(BETWEEN_STEPS, Phase.OPEN),
    Verb.SUBMIT: {Phase.OPEN: Phase.OPEN},
    Verb.FLUSH: {Phase.OPEN: Phase.FLUSHED},
    Verb.WAIT: {Phase.FLUSHED: Phase.DONE},
    Verb.COMMIT: {Phase.DONE: Phase.COMMITTED},
    Verb.KEEP: {Phase.DONE: Phase.COMMITTED},
    Verb.REFUSE: {Phase.DONE: Phase.DISCARDED},
    Verb.DISCARD: {Phase.DONE: Phase.DISCARDED},
    Verb.AMEND: BETWEEN_STEPS,
    Verb.RETIRE: dict.fromkeys(Phase, Phase.RETIRED),
}


@dataclass(frozen=True)
class Words:
    """Holds the parts of error texts in which frontends differ.

    ``step_is_open`` says why the state can be neither read nor replaced in the middle of a step. The others are advice
    that is appended to an error: ``late_gradient`` where a gradient arrived after its step was flushed,
    ``unequal_steps`` where some ranks applied the means and others did not.
    """

    step_is_open: str
    late_gradient: str = ""
    unequal_steps: str = ""


class Adapter(Protocol):
    """Gives the step driver what only the framework can do."""

    @property
    def listener(self) -> Listener | None:
        """Return the listener that is told of means before the step ends, or None."""
        ...

    @property
    def words(self) -> Words: ...

    def allocate(self, layer: int) -> int:
        """Return the address of memory for the mean of a layer that this rank has no gradient of.

        Runs on the engine's thread.
        """
        ...

    def digests(self) -> Digests: ...

    def begin_digests(self) -> Future[Digests]:
        """Start to compute the digests while training goes on; no parameter changes before the step is done."""
        ...

    def fingerprint(self, turn: int) -> DeferredFingerprint:
        """Return a fingerprint of parameters and optimizer at the start of a step; ``turn`` selects the sample."""
        ...

    def means_complete(self) -> None:
        """Check or use the means, which are now in the outputs. Errors and collectives are the same on all ranks."""
        ...

    def finalise(self) -> bool:
        """End a step that needs nothing more from the user. Return False if gradients are pending that no step took."""
        ...


def mean_of_rows(
    exchanger: Exchanger,
    name: str,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    rows: tuple[Array, Array] | None,
    divisor: float,
) -> Rows | None:
    """Return the sum over ranks of a row-sparse gradient, divided by ``divisor``; None if no rank has one.

    ``shape`` and ``dtype`` are those of the whole layer. ``rows`` has this rank's row numbers, in any order and with
    repetitions, and their values; None without a gradient.

    Repeated rows are added up on each rank first. The ranks send their rows, or the whole layer if that is less. Values
    travel and are added in float32, those of float64 layers in float64. Collective, blocking. Rounds: 2 of a few bytes
    (the numbers of rows), then 2 for rows or 1 for the whole layer. Wire per rank: (N-1) (8 + 4 row elements) bytes per
    row, or 2 d (N-1)/N.
    """
    wire = np.dtype("<f8" if dtype == np.float64 else "<f4")
    own = None if rows is None else _coalesce(name, shape, rows, wire)
    preemption = exchanger.pipeline.preemption
    # A model of sparse layers alone has no headers that could carry it.
    report = json.dumps([0 if own is None else len(own[0]), (own is not None) | preemption.bits])
    counts = [_count(part, preemption) for part in exchanger.allgather_bytes(report.encode())]
    if not any(has for _, has in counts):
        return None
    row_elements = math.prod(shape[1:])
    gathered_bytes = sum(n for n, _ in counts) * (8 + wire.itemsize * row_elements)
    add = _dense if gathered_bytes > 2 * wire.itemsize * math.prod(shape) else _gathered
    index, total = add(exchanger, shape, own, wire)
    return index, (total / wire.type(divisor)).astype(dtype, copy=False)


def _coalesce(name: str, shape: tuple[int, ...], rows: tuple[Array, Array], wire: np.dtype[Any]) -> Rows:
    index = np.asarray(rows[0]).astype(np.int64).reshape(-1)
    values = np.asarray(rows[1]).astype(wire).reshape(len(index), *shape[1:])
    if len(index) and (index.min() < 0 or index.max() >= shape[0]):
        raise StateError(f"layer {name!r} has a sparse gradient with row numbers outside of the layer")
    order = np.argsort(index, kind="stable")
    unique, begins = np.unique(index[order], return_index=True)
    if len(unique) == len(index):
        return unique, values[order]
    return unique, np.add.reduceat(values[order], begins, axis=0)


def _count(part: bytes, preemption: Preemption) -> tuple[int, bool]:
    try:
        rows, bits = json.loads(part)
        preemption.hear(int(bits))
        return int(rows), bool(bits & 1)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise WireFormatError(f"a count of sparse rows is malformed: {error}") from error


def _dense(exchanger: Exchanger, shape: tuple[int, ...], own: Rows | None, wire: np.dtype[Any]) -> Rows:
    total = np.zeros(shape, dtype=wire)
    if own is not None:
        total[own[0]] = own[1]
    exchanger.allreduce(total.reshape(-1))
    index = np.flatnonzero(total.any(axis=tuple(range(1, total.ndim))))
    return index, total[index]


def _gathered(exchanger: Exchanger, shape: tuple[int, ...], own: Rows | None, wire: np.dtype[Any]) -> Rows:
    payload = b"" if own is None else own[0].astype("<i8").tobytes() + own[1].tobytes()
    row_bytes = wire.itemsize * math.prod(shape[1:])
    parts: list[Rows] = []
    for rank, part in enumerate(exchanger.allgather_bytes(payload)):
        count, rest = divmod(len(part), 8 + row_bytes)
        index = np.frombuffer(part, dtype="<i8", count=count).astype(np.int64)
        if rest or (count and (index[0] < 0 or index[-1] >= shape[0] or (np.diff(index) <= 0).any())):
            raise WireFormatError(f"rank {rank} sent sparse rows outside the layer, or out of order")
        values = np.frombuffer(part, dtype=wire, offset=8 * count).reshape(count, *shape[1:])
        parts.append((index, values))
    union = np.unique(np.concatenate([index for index, _ in parts]))
    total = np.zeros((len(union), *shape[1:]), dtype=wire)
    for index, values in parts:  # rank order gives every rank the same bits
        total[np.searchsorted(union, index)] += values
    return union, total


#: A tuple and no set, because hashing an enumeration takes longer than the rest of a submission.
_TAKES_GRADIENTS = tuple(TRANSITIONS[Verb.SUBMIT])


@dataclass(frozen=True)
class Means:
    """Holds the means of a step that is done.

    ``rows`` has those of every sparse layer, None for a layer without a gradient on any rank.
    """

    result: StepResult
    rows: Mapping[int, Rows | None]


class StepDriver:
    """Controls the steps of one exchanger.

    ``exchanger`` is None in a world of one, where no verb is called. ``shapes`` has the shapes of the gradients, by
    layer. ``divisor`` divides the sums of sparse gradients. If ``agrees`` is true, the ranks vote before a step is
    accepted. ``rank`` is this rank's number in the job.

    Only one thread at a time may call a verb. Once the exchanger has failed, a step can be neither opened, nor waited
    for, nor accepted: these verbs raise its error. Gradients can still be submitted, and the step can be
    flushed and discarded.
    """

    def __init__(
        self,
        exchanger: Exchanger | None,
        checkpoint_manager: CheckpointManager,
        adapter: Adapter,
        shapes: Sequence[tuple[int, ...]],
        *,
        divisor: float = 1.0,
        agrees: bool = False,
        rank: int = 0,
    ) -> None:
        #: False in a world of one, which has no exchanger.
        self.attached = exchanger is not None
        if exchanger is not None:
            self.exchanger = exchanger
        #: Reads and replaces the compression state. In a world of one a step calls its ``before_step`` and no verb.
        self.checkpoint_manager = checkpoint_manager
        checkpoint_manager.finish_step = self.rest
        self._adapter = adapter
        self._shapes = shapes
        self._divisor = divisor
        #: True if the ranks vote before a step is accepted.
        self.agrees = agrees
        #: Called before a step in the state DONE ends, by any verb. Collective; an error is raised on all ranks. It is
        #: not called when means arrive, since those of several exchanges may arrive in another order on each rank.
        self.before_end: Callable[[], None] = lambda: None
        self._rank = rank
        self.phase = Phase.IDLE
        #: The means of the step that is done and neither accepted nor thrown away, if there is one.
        self.means: Means | None = None
        self._rows: dict[int, Callable[[], tuple[Array, Array]]] = {}
        #: This rank's error; the other ranks were told to stop.
        self._failed: tuple[type[GradcompError], str] | None = None

    # -- what a frontend may ask ----------------------------------------------------------------------------------

    @property
    def under_way(self) -> bool:
        """Return whether a step has begun and no thread has waited for it yet."""
        return self.phase is Phase.OPEN or self.phase is Phase.FLUSHED

    @property
    def error(self) -> GradcompError | None:
        """Return the error after which there can be no step any more, if there is one."""
        if self._failed is not None:
            kind, text = self._failed
            return kind(text)
        return self.exchanger.error if self.attached else None

    def refuse_dense(self, layer: int) -> None:
        """Raise StateError if a layer that is about to have a dense gradient has had sparse ones, on any rank."""
        pipeline = self.exchanger.pipeline
        if layer in pipeline.ordering.sparse:
            name = pipeline.layers[layer].name
            raise StateError(f"layer {name!r} had sparse gradients before and has a dense one now")

    def check(self) -> None:
        """Raise the error after which there can be no step any more, if there is one."""
        if (error := self.error) is not None:
            raise error

    # -- a step ---------------------------------------------------------------------------------------------------

    def open(
        self, scale: Number = 1.0, learning_rate: Number = 0.0, momenta: npt.NDArray[np.float64] | None = None
    ) -> None:
        """Begin a step, with the arguments of :meth:`gradcomp.exchange.exchanger.Exchanger.open`."""
        after = self._after(Verb.OPEN)
        self.checkpoint_manager.before_step()
        self.exchanger.open(scale, learning_rate, momenta)
        self._rows = {}
        self.phase = after

    def submit(self, submission: Submission) -> None:
        """Submit a dense gradient that is ready."""
        if self.phase not in _TAKES_GRADIENTS:
            raise self.late(submission.layer)
        if self.exchanger.recorder is not None:
            self.exchanger.recorder.take(submission)
        self.exchanger.pipeline.arrivals.submit(submission)

    def submit_all(
        self,
        layers: list[int],
        addresses: Addresses,
        keep: object,
        event: object = None,
        *,
        zero_is_absent: bool = False,
    ) -> None:
        """Submit dense gradients that are ready, see :meth:`Arrivals.submit_all`."""
        if self.phase not in _TAKES_GRADIENTS:
            raise self.late(layers[0])
        if self.exchanger.recorder is not None:
            for layer, address in zip(layers, addresses.tolist(), strict=True):
                self.exchanger.recorder.take(Submission(layer, address, address, keep, event, zero_is_absent))
        self.exchanger.pipeline.arrivals.submit_all(
            layers, addresses, keep, event, zero_is_absent=zero_is_absent
        )

    def submit_rows(self, layer: int, rows: Callable[[], tuple[Array, Array]]) -> None:
        """Submit a sparse gradient; the wait of the step calls ``rows`` for its row numbers and values."""
        if self.phase not in _TAKES_GRADIENTS:
            raise self.late(layer)
        self.exchanger.pipeline.arrivals.submit_absent(layer, sparse=True)
        self._rows[layer] = rows

    def flush(self, *, late: bool = False) -> None:
        """Take no more gradients in this step. ``late``: other ranks ended it, and not this rank's own gradients."""
        after = self._after(Verb.FLUSH)
        self.exchanger.flush(late=late)
        self.phase = after

    def wait(self) -> Means:
        """Block until all means have arrived, those of sparse layers too.

        A step whose means cannot be used is thrown away: StateError on every rank if a layer has a sparse gradient on
        one and a dense one on another, and whatever the adapter raises.
        """
        after = self._after(Verb.WAIT)
        result = self.exchanger.wait()
        self.phase = Phase.DISCARDED  # until it is found that the means can be used
        try:
            self._adapter.means_complete()
            self.means = Means(result, self._means_of_rows(result))
        except Exception:
            if self.error is None:
                self.exchanger.discard()
            raise
        self.exchanger.owes_vote = self.agrees
        self.phase = after
        return self.means

    def _means_of_rows(self, result: StepResult) -> Mapping[int, Rows | None]:
        """Return the means of all layers that some rank has had a sparse gradient of, a set that all ranks know."""
        layers = self.exchanger.pipeline.layers
        mixed = np.flatnonzero(result.present & result.sparse).tolist()
        if mixed:
            raise StateError(
                f"layer {layers[mixed[0]].name!r} has a sparse gradient on one rank and a dense one on another"
            )
        means: dict[int, Rows | None] = {}
        divisor = float(self.exchanger.pipeline.active) or self._divisor  # counted for means only
        for layer in sorted(self.exchanger.pipeline.ordering.sparse):
            wire = np.dtype("<f8" if layers[layer].dtype == "float64" else "<f4")
            rows = self._rows.pop(layer, None)
            with self.telling():  # the others wait for this rank's rows
                own = None if rows is None else rows()
                means[layer] = mean_of_rows(
                    self.exchanger, layers[layer].name, self._shapes[layer], wire, own, divisor
                )
        return means

    def commit(self, *, edited: bool = False) -> bool:
        """Accept the step: residuals take their new values, unless a mean is not finite.

        Return False if the ranks agreed to skip the step instead.

        ``edited``: the means were changed, while some rank is late.
        """
        after = self._ending(Verb.COMMIT)
        if self.agrees and not self.exchanger.vote(True):
            self.exchanger.skip()
            self._end(self._after(Verb.DISCARD))
            return False
        self.exchanger.commit(edited=edited)
        self._end(after)
        return True

    def keep(self) -> None:
        """End the step while its means stay in place, to be added to; what was sent counts as sent."""
        after = self._ending(Verb.KEEP)
        self._vote_against()
        self.exchanger.commit(KEPT)
        self._end(after)

    def refuse(self) -> None:
        """End a step that cannot be accepted because a value was not finite."""
        after = self._ending(Verb.REFUSE)
        self._vote_against()
        self.exchanger.commit(DISCARDED)
        self._end(after)

    def discard(self) -> None:
        """Discard the means; the compression state does not change."""
        after = self._ending(Verb.DISCARD)
        self._vote_against()
        self.exchanger.discard()
        self._end(after)

    def amend(self, outcome: int) -> None:
        """Change the outcome of the last step, for a frontend that learns it only later; 0: this rank had no step.

        The other ranks are told in the next step.
        """
        self._after(Verb.AMEND)
        if self.exchanger.pipeline.outcome:
            self.exchanger.pipeline.outcome = outcome

    def _ending(self, verb: Verb) -> Phase:
        """Return the phase that ``verb`` leads to; a step whose end ``before_end`` refuses is thrown away."""
        after = self._after(verb)
        try:
            self.before_end()
        except Exception:
            if self.error is None:
                self.exchanger.owes_vote = False
                self.exchanger.discard()
                self._end(self._after(Verb.DISCARD))
            raise
        return after

    def _vote_against(self) -> None:
        if self.agrees:
            self.exchanger.vote(False)  # the other ranks vote once per exchange, so this one must too

    def _end(self, phase: Phase) -> None:
        self.phase, self.means = phase, None

    def _after(self, verb: Verb) -> Phase:
        """Return the phase that ``verb`` leads to; raise if the verb is not allowed now."""
        after = TRANSITIONS[verb].get(self.phase)
        if after is None or self._failed is not None:
            raise self.error or StateError(f"cannot {verb.value}: {self.phase.value}")
        return after

    def late(self, layer: int) -> GradcompError:
        """Return the error for a gradient that comes when no step takes one."""
        name = self.exchanger.pipeline.layers[layer].name
        text = f"layer {name!r} has a gradient after its step closed{self._adapter.words.late_gradient}"
        return self.error or StateError(text)

    # -- outside of steps -----------------------------------------------------------------------------------------

    def rest(self) -> None:
        """Make sure that no step is under way before the state is read or replaced.

        It is local, unless means that are not finite are pending: all ranks end that step together.

        Raises the error of an exchanger that has failed, and StateError in the middle of a step.
        """
        if not self.attached:
            return
        self.check()
        if not self._adapter.finalise() or self.phase not in BETWEEN_STEPS:
            raise StateError(self._adapter.words.step_is_open)

    def fail(self, error: Exception) -> None:
        """Tell the other ranks, unless all have stopped, that this one cannot go on after ``error``."""
        if self.error is None:
            # Only type and text are kept: the error would keep the variables of all its frames alive.
            text = f"{type(error).__name__}: {error}"
            self._failed = StateError, text
            if isinstance(error, GradcompError):
                self._failed = type(error), str(error)
            self.exchanger.abort(f"rank {self._rank}: {text}")

    def retire(self, why: str) -> None:
        """Make every verb raise StateError with ``why``: another exchange has the layers. Local; all ranks call it."""
        if self.error is None:
            self._failed = StateError, why
        self._end(TRANSITIONS[Verb.RETIRE][self.phase])

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Call :meth:`fail` with what is raised in this context."""
        try:
            yield
        except Exception as error:
            self.fail(error)
            raise
