"""The exchange of one step: buckets begin in order, go through their rounds and gather the flags of all ranks."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter

import numpy as np
import numpy.typing as npt

from gradcomp.core.state import Residuals
from gradcomp.kernels.devices import Device
from gradcomp.kernels.step import StepContext
from gradcomp.pipeline.arrangement import Arrangement
from gradcomp.pipeline.bucket import BucketProgram
from gradcomp.pipeline.fingerprint import NOTHING, SoonFingerprint
from gradcomp.pipeline.gradient_registry import GradientRegistry
from gradcomp.pipeline.in_flight import InFlight, Waiting
from gradcomp.pipeline.layout import Bucket
from gradcomp.pipeline.memory import Allocate, StepMemory, Times
from gradcomp.pipeline.result import StepResult
from gradcomp.pipeline.soon import Number
from gradcomp.pipeline.steering import Steering
from gradcomp.pipeline.ticks import Ticks
from gradcomp.reduce.framing import Framed
from gradcomp.reduce.header import LATE, PRESENT, SPARSE, BucketFlags, HeaderId
from gradcomp.transport.base import Transport


@dataclass(frozen=True)
class Workplace:
    """Holds what the exchanges of one pipeline have in common.

    ``round_complete(seconds)`` is called for every round, ``on_complete(bucket)`` for every bucket. With
    ``overlap`` buckets begin before the flush, and beside each other.
    """

    device: Device
    registry: GradientRegistry
    steering: Steering
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
        laid_out: Arrangement,
        context: StepContext,
        residuals: Residuals,
        numbers: tuple[Number, Number],
        last_rate: float,
        fingerprint: SoonFingerprint,
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
        registry = workplace.registry
        registry.open(laid_out.layout)
        workplace.steering.open(context.number, self.opened_at, len(laid_out.programs))
        self._ticks: Ticks | None = Ticks(
            laid_out.programs,
            registry,
            workplace.device,
            transport,
            self._start,
            workplace.on_complete,
            [*numbers, fingerprint],
        )

    @property
    def position(self) -> tuple[int, int]:
        """Return the bucket and the round that are waited for; round -1 stands for the bucket's gradients."""
        return self._ticks.position if self._ticks else (len(self._laid_out.programs), 0)

    def run(self, header_id: HeaderId, own_state: int) -> Generator[Waiting, None, None]:
        """Run all buckets.

        ``header_id`` identifies messages, but for the bucket. ``own_state`` are the bits of this rank's state in
        the headers.
        """
        self._header_id, self._own_state = header_id, own_state
        contribute = partial(self._workplace.steering.contribute, self._context.number, self._transport)
        assert self._ticks is not None, "an exchange runs once"
        yield from self._ticks.run(overlap=self._workplace.overlap, last_is_issued=contribute)
        self._ticks = None  # a cycle with this object would keep both until the garbage collector runs
        self._take_numbers()

    def result(self) -> tuple[StepResult, bool]:
        """Return what all ranks know at the end, and whether all ranks are ready for the next plan."""
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
        registry, trace, step = place.registry, place.times.trace, self._context.number
        registry.decide(bucket.layers)
        complete = registry.completed[bucket.number]
        trace.add("ready", step, bucket.number, self.opened_at, complete)
        trace.add("queue", step, bucket.number, complete, perf_counter())
        states = np.append(registry.states[bucket.layers], np.uint8(self._own_state | LATE * self.late))
        flags = BucketFlags(states, self._transport.rank, self.fingerprint.value)
        self._flags.append((bucket.layers, flags))
        return InFlight(bucket.number, self._exchange(program, flags), self._completed)

    def _exchange(self, program: BucketProgram, flags: BucketFlags) -> Generator[Framed, None, None]:
        place, context = self._workplace, self._context
        memory = StepMemory(
            program.bucket, context, flags, place.registry, self._residuals, place.allocate, place.times
        )
        place.steering.start(program.bucket.groups, memory, context.scale)
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
            observations=self._workplace.steering.observations,
        )

    def _completed(self, bucket: int, begin: float, end: float) -> None:
        """Record a round that is complete."""
        self._workplace.times.trace.add("send", self._context.number, bucket, begin, end)
        self._workplace.round_complete(end - begin)
        self._workplace.steering.round_complete(bucket, end - begin)


def _known(number: Number) -> float:
    return number if isinstance(number, float | int) else number.result()
