"""A step's schedule decides which bucket begins when, and which round of which bucket is issued next."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

from gradcomp.kernels.devices import Device
from gradcomp.pipeline.bucket import BucketProgram
from gradcomp.pipeline.fingerprint import SoonFingerprint
from gradcomp.pipeline.gradient_registry import GradientRegistry
from gradcomp.pipeline.in_flight import InFlight, Waiting
from gradcomp.pipeline.layout import Bucket
from gradcomp.pipeline.soon import Number
from gradcomp.transport.base import Transport

Waits = Generator[Waiting, None, None]


class Ticks:
    """Leads one step through its buckets.

    Tick t issues round 0 of bucket t, round 1 of bucket t-1, ...: a total order that all ranks share. ``start``
    begins a bucket whose gradients are there; the first one also waits for ``numbers``. ``completed`` is called for
    a bucket whose means are in the outputs. ``position`` is the bucket and the round that are waited for; round -1
    stands for the bucket's gradients.
    """

    def __init__(
        self,
        programs: Sequence[BucketProgram],
        registry: GradientRegistry,
        device: Device,
        transport: Transport,
        start: Callable[[BucketProgram], InFlight],
        completed: Callable[[Bucket], None] | None,
        numbers: Sequence[Number | SoonFingerprint],
    ) -> None:
        self.position = (0, -1)
        self._programs = programs
        self._registry = registry
        self._device = device
        self._transport = transport
        self._start = start
        self._completed = completed
        self._numbers = numbers
        self._begun = 0
        self._in_flight: list[InFlight] = []  # newest first
        self._ahead: InFlight | None = None  # the next bucket, if it began while another one waited

    def run(self, *, overlap: bool, last_is_issued: Callable[[], None]) -> Waits:
        """Run all buckets; call ``last_is_issued`` after the first round of the last bucket."""
        while not overlap and not self._registry.flushed:
            yield Waiting.LAYERS
        for program in self._programs:
            started, self._ahead = self._ahead, None
            if started is None:
                yield from self._complete(program.bucket)
                started = self._begin(program)
            self._in_flight.insert(0, started)
            yield from self._prepared(started, overlap)
            started.issue(self._transport)
            if program is self._programs[-1]:
                last_is_issued()
            yield from self._advance(self._in_flight[1:], overlap)
            while self._in_flight and not overlap:
                yield from self._advance(self._in_flight, overlap)
        if not self._programs:  # every layer has sparse gradients
            yield from self._known()
            last_is_issued()
        while self._in_flight:
            yield from self._advance(self._in_flight, overlap)
        self.position = (len(self._programs), 0)

    def _begin(self, program: BucketProgram) -> InFlight:
        self._begun += 1
        return self._start(program)

    def _advance(self, in_flight: Sequence[InFlight], overlap: bool) -> Waits:
        """Issue the next round of these buckets, the newest first, and drop those that are complete."""
        for one in list(in_flight):
            yield from self._prepared(one, overlap)
            if not one.issue(self._transport):
                self._in_flight.remove(one)
                if self._completed is not None:
                    self._completed(self._programs[one.number].bucket)

    def _complete(self, bucket: Bucket) -> Waits:
        """Wait until the gradients of a bucket are complete and ready, so that it can be encoded."""
        while not self._registry.ready(bucket.number):
            self.position = (bucket.number, -1)
            self._meanwhile()
            yield Waiting.LAYERS
        if self._device.is_late:
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

    def _prepared(self, in_flight: InFlight, overlap: bool) -> Waits:
        """Wait until the bucket's next round is due, or the bucket is complete."""
        while (waiting := in_flight.prepare()) is not Waiting.NOTHING:
            self.position = (in_flight.number, in_flight.round)
            self._meanwhile(in_flight)
            if overlap:
                self._look_ahead()
            yield waiting

    def _meanwhile(self, waiting: InFlight | None = None) -> None:
        """Prepare all buckets but the one that waits for a device, without issuing anything."""
        if not self._device.is_late:
            return
        for other in self._in_flight:
            if other is not waiting:
                other.prepare()

    def _look_ahead(self) -> None:
        """Begin the next bucket early beside a device, if it is complete: only one, since it takes memory."""
        if not self._device.is_late:
            return
        if self._ahead is not None:
            self._ahead.prepare()
        elif self._begun < len(self._programs) and self._registry.ready(self._begun):
            program = self._programs[self._begun]
            events = self._events(program.bucket)
            if self._device.reached(events):
                self._device.follow(events)
                self._ahead = self._begin(program)
                self._ahead.prepare()

    def _events(self, bucket: Bucket) -> list[Any]:
        return [self._registry.events[layer] for layer in bucket.layers.tolist()]
