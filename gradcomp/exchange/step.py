"""One step of the exchange: buckets begin in order, go through their rounds and gather the flags of all ranks."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt

from gradcomp.core.state import Residuals
from gradcomp.exchange.arrivals import Arrivals
from gradcomp.exchange.bucket import BucketProgram
from gradcomp.exchange.compiled_plan import CompiledPlan
from gradcomp.exchange.fingerprint import NOTHING, DeferredFingerprint
from gradcomp.exchange.layout import Bucket
from gradcomp.exchange.memory import Allocate, StepMemory, Times
from gradcomp.exchange.plans import Plans
from gradcomp.exchange.waiting import Number, Waiting
from gradcomp.kernels.devices import Device
from gradcomp.kernels.replayed_calls import Pending
from gradcomp.kernels.step import StepContext
from gradcomp.reduce.base import Framed
from gradcomp.reduce.header import LATE, PRESENT, SPARSE, BucketFlags, HeaderId
from gradcomp.transport.base import Handle, Operation, Transport

Mask = npt.NDArray[np.bool_]

#: Yields what is missing. A handle stands for Waiting.WIRE: nothing else can be done until that collective is complete.
Waits = Generator[Waiting | Handle, None, None]


@dataclass(frozen=True)
class StepResult:
    """Holds what all ranks know of a finished exchange: one boolean per layer, equal on all ranks.

    ``present``: some rank had a dense gradient. ``sparse``: some rank had a sparse one. ``nonfinite``: some rank
    had a NaN or an infinity, or the mean overflowed. ``outcomes`` has the outcomes of the exchange before, as bits
    of all ranks. ``notices`` has LATE of this exchange, EDITED of the one before, and DIFFERENT, each if some rank
    set it. ``results`` is a check value of all coded means as this rank decodes them, which differs between ranks
    only if something is wrong; sums are no part of it.
    """

    step: int
    present: Mask
    sparse: Mask
    nonfinite: Mask
    outcomes: int = 0
    notices: int = 0
    results: int = 0

    @property
    def finite(self) -> bool:
        """Return whether the step may be committed."""
        return not self.nonfinite.any()

    @property
    def parted(self) -> bool:
        """Return whether the ranks did different things with the means of the exchange before."""
        return self.outcomes & (self.outcomes - 1) != 0


class InFlight:
    """Runs one bucket's program between its collectives.

    The caller decides when collectives are issued, since all ranks share their order. What lies between two of
    them can be done at any time: handles are polled, kernels are started and finished. ``round`` is the last one
    that was issued, -1 before the first. ``is_complete`` says that the program has ended. ``completed(bucket,
    begin, end)`` is called for every round.
    """

    def __init__(
        self,
        number: int,
        program: Generator[Framed, None, None],
        completed: Callable[[int, float, float], None],
    ) -> None:
        self.number = number
        self.round = -1
        self.is_complete = False
        self._program = program
        self._completed = completed
        self._handles: list[Handle] | None = None  # of the round that was issued last
        self._call: Pending | None = None
        self._due: list[Operation] | None = None  # the next round, which is not issued yet
        self._issued = 0.0

    @property
    def awaited(self) -> Handle:
        """Return the collective that :meth:`prepare` waits for on the wire."""
        assert self._handles, "a round was issued"
        return self._handles[0]

    def prepare(self) -> Waiting:
        """Go on without waiting or issuing; return NOTHING when a round is due or the bucket is complete."""
        while not self.is_complete and self._due is None:
            if self._handles is not None:
                while self._handles:
                    if not self._handles[0].poll():
                        return Waiting.WIRE
                    del self._handles[0]
                self._handles = None
                self._completed(self.number, self._issued, perf_counter())
            if self._call is not None:
                if not self._call.done():
                    return Waiting.DEVICE
                self._call = None
            try:
                step = next(self._program)
            except StopIteration:
                self.is_complete = True
                continue
            if isinstance(step, list):
                self._due = step
            else:
                self._call = step
        return Waiting.NOTHING

    def issue(self, transport: Transport) -> bool:
        """Issue the round that is due; return False if there is none, since the bucket is complete."""
        if self.is_complete:
            return False
        assert self._due is not None, "it was prepared"
        operations, self._due = self._due, None
        self._issued = perf_counter()
        self._handles = [operation.issue(transport) for operation in operations]
        self.round += 1
        return True


class BucketScheduler:
    """Leads one step through its buckets.

    Tick t issues round 0 of bucket t, round 1 of bucket t-1, ...: a total order that all ranks share. ``start``
    begins a bucket whose gradients are there; the first one also waits for ``numbers``. ``completed`` is called for
    a bucket whose means are in the outputs. ``position`` is the bucket and the round that are waited for; round -1
    stands for the bucket's gradients.
    """

    def __init__(
        self,
        programs: Sequence[BucketProgram],
        arrivals: Arrivals,
        device: Device,
        transport: Transport,
        start: Callable[[BucketProgram], InFlight],
        completed: Callable[[Bucket], None] | None,
        numbers: Sequence[Number | DeferredFingerprint],
    ) -> None:
        self.position = (0, -1)
        self._programs = programs
        self._arrivals = arrivals
        self._device = device
        self._late = device.is_late
        self._transport = transport
        self._start = start
        self._completed = completed
        self._numbers = numbers
        self._begun = 0
        self._in_flight: list[InFlight] = []  # newest first
        self._ahead: InFlight | None = None  # the next bucket, if it began while another one waited

    def run(self, *, overlap: bool, last_is_issued: Callable[[], None]) -> Waits:
        """Run all buckets; call ``last_is_issued`` after the first round of the last bucket."""
        while not overlap and not self._arrivals.flushed:
            yield Waiting.LAYERS
        for program in self._programs:
            started, self._ahead = self._ahead, None
            if started is None:
                yield from self._complete(program.bucket)
                started = self._begin(program)
            others = list(self._in_flight)
            self._in_flight.insert(0, started)
            yield from self._advance([started], overlap)
            if program is self._programs[-1]:
                last_is_issued()
            yield from self._advance(others, overlap)
            while self._in_flight and not overlap:
                yield from self._advance(list(self._in_flight), overlap)
        if not self._programs:  # every layer has sparse gradients
            yield from self._known()
            last_is_issued()
        while self._in_flight:
            yield from self._advance(list(self._in_flight), overlap)
        self.position = (len(self._programs), 0)

    def _begin(self, program: BucketProgram) -> InFlight:
        self._begun += 1
        return self._start(program)

    def _advance(self, in_flight: Sequence[InFlight], overlap: bool) -> Waits:
        """Issue the next round of these buckets, the newest first, and drop those that are complete."""
        for one in in_flight:
            while (waiting := one.prepare()) is not Waiting.NOTHING:
                self.position = (one.number, one.round)
                if self._late:
                    self._meanwhile(one)
                    if overlap:
                        self._look_ahead()
                yield waiting if self._late or waiting is not Waiting.WIRE else one.awaited
            if not one.issue(self._transport):
                self._in_flight.remove(one)
                if self._completed is not None:
                    self._completed(self._programs[one.number].bucket)

    def _complete(self, bucket: Bucket) -> Waits:
        """Wait until the gradients of a bucket are complete and ready, so that it can be encoded."""
        while not self._arrivals.ready(bucket.number):
            self.position = (bucket.number, -1)
            self._meanwhile()
            yield Waiting.LAYERS
        if self._late:
            events = self._events(bucket)
            while not self._device.reached(events):
                self._meanwhile()
                yield Waiting.DEVICE
            self._device.follow(events)
        yield from self._known()

    def _known(self) -> Waits:
        """Wait until the loss scale and the learning rate are known: they are the step's own, whatever follows."""
        for number in self._numbers:
            while not isinstance(number, float | int) and not number.done():
                self._meanwhile()
                yield Waiting.DEVICE
        self._numbers = ()

    def _meanwhile(self, waiting: InFlight | None = None) -> None:
        """Prepare all buckets but the one that waits for a device, without issuing anything."""
        for other in self._in_flight:
            if self._late and other is not waiting:
                other.prepare()

    def _look_ahead(self) -> None:
        """Begin the next bucket early beside a device, if it is complete: only one, since it takes memory."""
        if self._ahead is not None:
            self._ahead.prepare()
        elif self._begun < len(self._programs) and self._arrivals.ready(self._begun):
            program = self._programs[self._begun]
            events = self._events(program.bucket)
            if self._device.reached(events):
                self._device.follow(events)
                self._ahead = self._begin(program)
                self._ahead.prepare()

    def _events(self, bucket: Bucket) -> list[Any]:
        return [self._arrivals.events[layer] for layer in bucket.layers.tolist()]


@dataclass(frozen=True)
class Workplace:
    """Holds what the exchanges of one pipeline have in common.

    ``round_complete(seconds)`` is called for every round, ``on_complete(bucket)`` for every bucket. With
    ``overlap`` buckets begin before the flush, and beside each other.
    """

    device: Device
    arrivals: Arrivals
    plans: Plans
    times: Times
    allocate: Allocate
    round_complete: Callable[[float], None]
    on_complete: Callable[[Bucket], None] | None
    overlap: bool


class StepExchange:
    """Runs one step's exchange, from its opening until all means are in the outputs.

    ``residuals``, and the fields in ``context``, are those of the step. ``numbers``, the loss scale and the
    learning rate, may come later than the exchange opens: the first bucket waits for them. ``last_rate`` is the
    learning rate of the last accepted step, 0 if it is not known. The headers carry ``fingerprint``, of parameters
    and optimizer, and ``results``, the check value of the last exchange.
    """

    def __init__(
        self,
        workplace: Workplace,
        transport: Transport,
        laid_out: CompiledPlan,
        context: StepContext,
        residuals: Residuals,
        numbers: tuple[Number, Number],
        last_rate: float,
        fingerprint: DeferredFingerprint,
        results: int,
    ) -> None:
        self._workplace, self._transport, self._laid_out = workplace, transport, laid_out
        self._context, self._residuals = context, residuals
        self._numbers: tuple[Number, Number] | None = numbers  # until they are known
        self._last_rate = last_rate
        self._fingerprint, self._last_results = fingerprint, results
        self._header_id = HeaderId(0, 0, 0)
        self._own_state = 0
        #: Set before the flush, if it is not this rank's own gradients that end the exchange.
        self.late = False
        self._flags: list[tuple[npt.NDArray[np.int64], BucketFlags]] = []  # of the buckets that have begun
        self.scale = 1.0
        self.learning_rate = 0.0
        #: This rank's fingerprint, once the first bucket has begun.
        self.fingerprint = NOTHING
        self.opened_at = perf_counter()
        arrivals = workplace.arrivals
        arrivals.open(laid_out.layout)
        workplace.plans.open(context.number, self.opened_at, len(laid_out.programs))
        self._scheduler: BucketScheduler | None = BucketScheduler(
            laid_out.programs,
            arrivals,
            workplace.device,
            transport,
            self._start,
            workplace.on_complete,
            [*numbers, fingerprint],
        )

    @property
    def position(self) -> tuple[int, int]:
        """Return the bucket and the round that are waited for.

        In round -1 the bucket's gradients are missing, or a device still encodes them.
        """
        return self._scheduler.position if self._scheduler else (len(self._laid_out.programs), 0)

    def run(self, header_id: HeaderId, own_state: int) -> Waits:
        """Return what runs all buckets.

        ``header_id`` identifies messages, but for the bucket. ``own_state`` are the bits of this rank's state in
        the headers.
        """
        self._header_id, self._own_state = header_id, own_state
        contribute = partial(self._workplace.plans.contribute, self._context.number, self._transport)
        assert self._scheduler is not None, "an exchange runs once"
        return self._scheduler.run(overlap=self._workplace.overlap, last_is_issued=contribute)

    def result(self) -> tuple[StepResult, bool]:
        """Return what all ranks know at the end, and whether all ranks are ready for the next plan."""
        self._scheduler = None  # a cycle with this object would keep both until the garbage collector runs
        self._take_numbers()
        states = np.zeros(len(self._laid_out.position), dtype=np.uint8)
        outcomes = notices = results = 0
        for layers, flags in self._flags:
            states[layers] |= flags.states[:-1]
            outcomes |= flags.outcomes
            notices |= flags.notices
            results = zlib.crc32(flags.checksum.to_bytes(4, "little"), results)
        present = (states & PRESENT) != 0
        sparse = (states & SPARSE) != 0
        nonfinite = (states & ~np.uint8(PRESENT | SPARSE)) != 0
        ready = bool(self._flags) and self._flags[0][1].ready
        return (
            StepResult(self._context.number, present, sparse, nonfinite, outcomes, notices, results),
            ready,
        )

    def _start(self, program: BucketProgram) -> InFlight:
        """Begin a bucket that can be encoded."""
        self._take_numbers()
        place, bucket = self._workplace, program.bucket
        arrivals, trace, step = place.arrivals, place.times.trace, self._context.number
        arrivals.decide(bucket.layers)
        complete = arrivals.completed[bucket.number]
        trace.add("ready", step, bucket.number, self.opened_at, complete)
        trace.add("queue", step, bucket.number, complete, perf_counter())
        states = np.append(arrivals.states[bucket.layers], np.uint8(self._own_state | LATE * self.late))
        flags = BucketFlags(states, self._transport.rank, self.fingerprint.value)
        self._flags.append((bucket.layers, flags))
        return InFlight(bucket.number, self._exchange(program, flags), self._completed)

    def _exchange(self, program: BucketProgram, flags: BucketFlags) -> Generator[Framed, None, None]:
        place, context = self._workplace, self._context
        memory = StepMemory(
            program.bucket, context, flags, place.arrivals, self._residuals, place.allocate, place.times
        )
        place.plans.start(program.bucket.groups, memory, context.scale)
        return program.run(replace(self._header_id, bucket=program.bucket.number), context, memory, flags)

    def _take_numbers(self) -> None:
        """Complete the step's context by the loss scale and the learning rate, which have come."""
        if self._numbers is None:
            return
        self.scale, self.learning_rate = map(_known, self._numbers)
        self.fingerprint = replace(self._fingerprint.result(), results=self._last_results)
        self._numbers = None
        last, rate = self._last_rate, self.learning_rate
        self._context = replace(
            self._context,
            scale=1.0 / self.scale,
            unscale=self.scale,
            rate_ratio=last / rate if last and rate else 1.0,
            observations=self._workplace.plans.observations,
        )

    def _completed(self, bucket: int, begin: float, end: float) -> None:
        """Record a round that is complete."""
        self._workplace.times.trace.add("send", self._context.number, bucket, begin, end)
        self._workplace.round_complete(end - begin)
        self._workplace.plans.round_complete(bucket, end - begin)


def _known(number: Number) -> float:
    return number if isinstance(number, float | int) else number.result()
