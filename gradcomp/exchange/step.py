"""One step of the exchange: buckets begin in order, go through their rounds and gather the flags of all ranks."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from gradcomp.exchange.fingerprint import NOTHING, DeferredFingerprint
from gradcomp.exchange.layout import Bucket
from gradcomp.exchange.memory import StepMemory
from gradcomp.exchange.waiting import Number, Waiting
from gradcomp.kernels.codec import Sizes
from gradcomp.kernels.replayed_calls import Pending
from gradcomp.kernels.step import StepContext
from gradcomp.reduce.base import Framed
from gradcomp.reduce.header import EDITED, LATE, PRESENT, SPARSE, WAITING, BucketFlags, HeaderId
from gradcomp.transport.base import Handle, Operation, Transport

if TYPE_CHECKING:
    from gradcomp.exchange.pipeline import Pipeline

Mask = npt.NDArray[np.bool_]

#: Yields what is missing. A handle stands for Waiting.WIRE: nothing else can be done until that collective is complete.
Waits = Generator[Waiting | Handle, None, None]


@dataclass(frozen=True)
class StepResult:
    """Holds the results of a finished exchange that all ranks know: one boolean per layer, equal on all ranks.

    ``present``: some rank had a dense gradient. ``sparse``: some rank had a sparse one. ``nonfinite``: some rank
    had a NaN or an infinity, or the mean overflowed. ``outcomes`` has the outcomes of the exchange before, as bits
    of all ranks. ``notices`` has LATE and PREEMPTED of this exchange, EDITED of the one before, and DIFFERENT, each if
    some rank set it. ``results`` is a check value of all coded means as this rank decodes them, which differs between
    ranks only if something is wrong; sums are no part of it.
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
    that was issued, -1 before the first, at the time ``issued``. ``is_complete`` says that the program has ended.
    ``completed(this, end)`` is called for every round.
    """

    def __init__(
        self,
        number: int,
        program: Generator[Framed, None, None],
        completed: Callable[[InFlight, float], None],
    ) -> None:
        self.number = number
        self.round = -1
        self.is_complete = False
        self._program = program
        self._completed = completed
        #: The collectives of the round that was issued last, from the first one that is not complete.
        self.handles: list[Handle] = []
        self._call: Pending | None = None
        self._due: list[Operation] | None = None  # the next round, which is not issued yet
        self._operations: list[Operation] = []  # of the last round
        self.issued = 0.0

    @property
    def senders(self) -> tuple[int, ...]:
        """Return the ranks whose messages the last round waits for."""
        if len(self._operations) == 1:
            return self._operations[0].senders
        return tuple({sender for operation in self._operations for sender in operation.senders})

    def prepare(self) -> Waiting:
        """Go on without waiting or issuing; return NOTHING when a round is due or the bucket is complete."""
        while not self.is_complete and self._due is None:
            if self.handles:
                while self.handles:
                    if not self.handles[0].poll():
                        return Waiting.WIRE
                    del self.handles[0]
                self._completed(self, perf_counter())
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
        self._operations, self._due = self._due, None
        self.issued = perf_counter()
        for operation in self._operations:
            self.handles.append(operation.issue(transport))
        self.round += 1
        return True


class StepExchange:
    """Runs one step, from its opening until all means are in the outputs.

    Tick t issues round 0 of the bucket that travels as number t, round 1 of the one before, ...: a total order that all
    ranks share.

    ``context`` lacks ``numbers``, the loss scale and the learning rate. These, and the ``fingerprint`` of parameters
    and optimizer, may come after the exchange opens; the first bucket waits for all three, since headers hold the
    fingerprint. ``position`` is the bucket and the round that are waited for; in round -1 the bucket's gradients are
    missing, or a device still encodes them.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        context: StepContext,
        numbers: tuple[Number, Number],
        fingerprint: DeferredFingerprint,
    ) -> None:
        self._pipeline, self._context = pipeline, context
        self._programs, self._travel = pipeline.laid_out.programs, pipeline.travel
        self._arrivals, self._plans, self._device = pipeline.arrivals, pipeline.plans, pipeline.device
        #: Read now, on the thread that opens steps, so that all ranks count in the same ones.
        self._trains = pipeline.trains
        #: The numbers that a device still computes; empty once all are known.
        self._unknown: tuple[Number | DeferredFingerprint, ...] = (*numbers, fingerprint)
        self._own_state = 0
        self._flags: list[tuple[Sizes, BucketFlags]] = []  # of the buckets that have begun
        self._in_flight: list[InFlight] = []  # newest first
        self._ahead: InFlight | None = None  # the next bucket, if it began while another one waited
        self._begun = 0
        #: When each bucket's means were there, on time.perf_counter's clock.
        self.ended = np.zeros(len(self._programs))
        self._fingerprint_value = 0
        #: Set before the flush, if it is not this rank's own gradients that end the exchange.
        self.late = False
        self.position = (0, -1)
        self.learning_rate = 0.0
        #: This rank's fingerprint, once the first bucket has begun.
        self.fingerprint = NOTHING
        self.opened_at = perf_counter()
        self._arrivals.open(pipeline.layout)
        self._plans.open(context.number, self.opened_at, len(self._programs))

    def run(self) -> Waits:
        """Exchange the step's buckets in order, then end the step."""
        pipeline, programs, in_flight = self._pipeline, self._programs, self._in_flight
        travel = self._travel
        late, overlap, transport = self._device.is_late, pipeline.config.overlap, pipeline.transport
        self._plans.follow(pipeline.step, pipeline.plan, pipeline.ordering.cold | pipeline.ordering.sparse)
        if self._plans.active is not None:
            while self._plans.active.overdue:
                yield Waiting.BACKGROUND
        self._own_state = pipeline.outcome | pipeline.notices & EDITED | pipeline.preemption.bits
        self._own_state |= WAITING * (not self._plans.ready)
        while not overlap and not self._arrivals.flushed:
            yield Waiting.LAYERS
        pipeline.active = 0
        if self._trains is not None:
            self.position = (0, 0)
            yield from pipeline.count_active(self._trains)
        if not programs:  # every layer has sparse gradients
            yield from self._learn_numbers()
            pipeline.contribute()
        following = 0
        while following < len(programs) or in_flight:
            if following < len(programs) and (overlap or not in_flight):
                newest, self._ahead = self._ahead, None
                if newest is None:
                    yield from self._complete(programs[travel[following]].bucket)
                    newest = self._begin()
                in_flight.insert(0, newest)
                following += 1
            for one in list(in_flight):
                while (waiting := one.prepare()) is not Waiting.NOTHING:
                    self.position = (one.number, one.round)
                    if late:
                        self._meanwhile(one)
                        if overlap:
                            self._look_ahead()
                    yield waiting if late or waiting is not Waiting.WIRE else one.handles[0]
                is_first = one.round < 0
                if not one.issue(transport):
                    in_flight.remove(one)
                    self.ended[one.number] = perf_counter()
                    if pipeline.listener is not None:
                        pipeline.listener.bucket_complete(programs[one.number].bucket)
                if is_first and one.number == travel[-1]:
                    pipeline.contribute()
        self.position = (len(programs), 0)
        yield from pipeline.end_step(self)

    def result(self) -> tuple[StepResult, bool]:
        """Return what all ranks know at the end, and whether all ranks are ready for the next plan."""
        states = np.zeros(len(self._pipeline.layers), dtype=np.uint8)
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
        return StepResult(self._context.number, present, sparse, nonfinite, outcomes, notices, results), ready

    def _begin(self) -> InFlight:
        """Begin the next bucket, which can be encoded."""
        pipeline, program = self._pipeline, self._programs[self._travel[self._begun]]
        arrivals, bucket, number = self._arrivals, program.bucket, program.bucket.number
        self._begun += 1
        arrivals.decide(bucket.layers)
        complete = arrivals.completed[number]
        pipeline.trace.add(("ready", pipeline.step, number, self.opened_at, complete))
        pipeline.trace.add(("queue", pipeline.step, number, complete, perf_counter()))
        states = np.empty(len(bucket.layers) + 1, dtype=np.uint8)
        states[:-1], states[-1] = arrivals.states[bucket.layers], self._own_state | LATE * self.late
        flags = BucketFlags(states, pipeline.transport.rank, self._fingerprint_value)
        self._flags.append((bucket.layers, flags))
        memory = StepMemory(
            bucket,
            self._context,
            flags,
            arrivals,
            pipeline.residuals,
            pipeline.allocate,
            pipeline.trace,
            pipeline.statistics,
        )
        if self._plans.active is not None:
            self._plans.start(bucket.groups, memory, self._context.scale)
        if pipeline.samples is not None:
            pipeline.samples.look(pipeline.step, pipeline.laid_out_plan, bucket, memory, self._context.scale)
        header_id = HeaderId(pipeline.header_check, pipeline.step, number, pipeline.checksums)
        running = program.run(header_id, self._context, memory, flags)
        return InFlight(number, running, self._completed)

    def _complete(self, bucket: Bucket) -> Waits:
        """Wait until the gradients of a bucket are complete and ready, so that it can be encoded."""
        while not self._arrivals.ready(bucket.number):
            self.position = (bucket.number, -1)
            self._meanwhile()
            yield Waiting.LAYERS
        if self._device.is_late:
            events = self._events(bucket)
            while not self._device.reached(events):
                self._meanwhile()
                yield Waiting.DEVICE
            self._device.follow(events)
        if self._unknown:
            yield from self._learn_numbers()

    def _learn_numbers(self) -> Waits:
        """Wait for the loss scale, the learning rate and the fingerprint, which complete the step's context."""
        known: list[Any] = []
        for number in self._unknown:
            if isinstance(number, float | int):
                known.append(number)
                continue
            while not number.done():
                self._meanwhile()
                yield Waiting.DEVICE
            known.append(number.result())
        self._unknown = ()
        scale, self.learning_rate, fingerprint = known
        self.fingerprint = replace(fingerprint, results=self._pipeline.results)
        self._fingerprint_value = self.fingerprint.value
        last, rate = self._pipeline.learning_rate, self.learning_rate
        self._context = replace(
            self._context,
            scale=1.0 / scale,
            unscale=scale,
            rate_ratio=last / rate if last and rate else 1.0,
            observations=self._plans.observations,
            active=self._pipeline.active,
        )

    def _meanwhile(self, waiting: InFlight | None = None) -> None:
        """Prepare all buckets but the one that waits for a device, without issuing anything."""
        for other in self._in_flight:
            if self._device.is_late and other is not waiting:
                other.prepare()

    def _look_ahead(self) -> None:
        """Begin the next bucket early, while a device works, if it is complete; only one, since it takes memory."""
        if self._ahead is not None:
            self._ahead.prepare()
        elif self._begun < len(self._programs) and self._arrivals.ready(self._travel[self._begun]):
            events = self._events(self._programs[self._travel[self._begun]].bucket)
            if self._device.reached(events):
                self._device.follow(events)
                self._ahead = self._begin()
                self._ahead.prepare()

    def _events(self, bucket: Bucket) -> list[Any]:
        return [self._arrivals.events[layer] for layer in bucket.layers.tolist()]

    def _completed(self, one: InFlight, end: float) -> None:
        """Record a round that is complete."""
        self._pipeline.trace.add(
            ("send", self._context.number, one.number, one.issued, end, one.round, one.senders)
        )
        self._pipeline.round_complete(end - one.issued)
        self._plans.wire_seconds[one.number] += end - one.issued
