"""The step protocol: buckets in an agreed order, one round of each per tick, votes, commit, changes of plan.

No threads and no sockets: the owner submits layers, polls until the step is done, and commits or discards it. N
pipelines over an in-process transport run N ranks in one thread.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter, sleep
from typing import Any

import numpy as np
import numpy.typing as npt

from gradcomp.compress.base import MOMENTUM
from gradcomp.compress.messages import Context
from gradcomp.compress.policy import Schedule
from gradcomp.control.base import ControllerRun
from gradcomp.control.candidates import sent_bytes
from gradcomp.core.config import HOST_SLICE, Config
from gradcomp.core.errors import ConfigError, PlanMismatchError, StateError, WireFormatError
from gradcomp.core.layers import LayerSpec, check_unique
from gradcomp.core.plan import Fingerprint, Plan
from gradcomp.core.scheme import AUTO, parse
from gradcomp.core.state import Fields, Range, Residuals
from gradcomp.core.statistics import Statistics, Trace
from gradcomp.core.topology import Topology
from gradcomp.kernels.codec import Draw
from gradcomp.kernels.cuda.mirrors import mirror
from gradcomp.kernels.devices import HOST, Device
from gradcomp.pipeline.arrangement import Arrangement, Arrangements, by_layer
from gradcomp.pipeline.bucket import BucketProgram
from gradcomp.pipeline.digests import Digests
from gradcomp.pipeline.discards import Discards
from gradcomp.pipeline.gradient_registry import GradientRegistry
from gradcomp.pipeline.in_flight import InFlight, Waiting
from gradcomp.pipeline.layout import Bucket, Layout, build_layout, compressors_of
from gradcomp.pipeline.memory import Allocate, StepMemory
from gradcomp.pipeline.soon import Number
from gradcomp.pipeline.steering import Steering
from gradcomp.pipeline.switching import Switch
from gradcomp.reduce import Part, Reduction, make
from gradcomp.reduce.base import Call, Memory, Step
from gradcomp.reduce.costs import cheapest
from gradcomp.reduce.header import APPLIED, DISCARDED, PRESENT, SPARSE, BucketFlags, HeaderId
from gradcomp.reduce.model import Network
from gradcomp.transport.base import AllGather, AllReduce, Handle, Operation, Transport, host_allocator

Mask = npt.NDArray[np.bool_]

#: What kernels of a bucket take is far below it.
_LONGEST_FAREWELL_SECONDS = 5.0


@dataclass(frozen=True)
class StepResult:
    """What all ranks know of a finished exchange. One boolean per layer; equal on all ranks.

    ``present``: some rank had a dense gradient. ``sparse``: some rank had a sparse one. ``nonfinite``: some rank had a
    NaN or an infinity, or the mean overflowed. ``outcomes``: what became of the exchange before, as bits of all ranks.
    """

    step: int
    present: Mask
    sparse: Mask
    nonfinite: Mask
    outcomes: int = 0

    @property
    def finite(self) -> bool:
        """Whether the step may be committed."""
        return not self.nonfinite.any()

    @property
    def parted(self) -> bool:
        """Whether some ranks applied the means of the exchange before, and others did something else."""
        return self.outcomes & (self.outcomes - 1) != 0


class Pipeline:
    """One rank's side of an exchanger.

    ``allocate(layer)`` makes room for the mean of a layer that only other ranks had. ``average=False`` hands out the
    sum over ranks instead of the mean. ``on_complete(bucket)`` is called when a bucket's means are in the outputs.
    ``order_step``: the step in which rank 0's order of arrival becomes the order of the buckets. ``schedule``: asked
    with a step and a version, the plan that begins then; the same on all ranks. ``topology``: who shares a host; by
    default all do. ``network``: measured constants, the same on all ranks; ``reduction="auto"`` needs them where there
    are several hosts. ``device``: where gradients and means are, and so the state. Apart from the gradient registry,
    methods are called by one thread at a time.

    Where the scheme has dedicated servers, the first ranks only serve: they hand in nothing, and what is averaged,
    drawn and voted on is the others', as if there were no more ranks than those.
    """

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        plan: Plan,
        transport: Transport,
        config: Config,
        allocate: Allocate,
        *,
        average: bool = True,
        on_complete: Callable[[Bucket], None] | None = None,
        order_step: int = 0,
        schedule: Schedule | None = None,
        topology: Topology | None = None,
        network: Network | None = None,
        controller: ControllerRun | None = None,
        device: Device = HOST,
    ) -> None:
        check_unique(layers)
        if not layers:
            raise ConfigError("there is no layer to exchange")
        plan.check_covers(layers)
        self.layers = tuple(layers)
        self.plan = plan
        self.transport = transport
        # Whoever makes pipelines for several ranks has chosen for all of them.
        self.config = config if config.slice_elements else replace(config, slice_elements=HOST_SLICE)
        self.step = 0
        self.order: list[int] = list(range(len(layers)))
        self.cold: frozenset[int] = frozenset()
        self.sparse: frozenset[int] = frozenset()
        self.registry = GradientRegistry(self.layers)
        self.device = device
        messages = transport.allocator(device)
        local = messages
        if device.driver is not None and messages is host_allocator:
            local = partial(mirror, device.driver)
        self._memory = Memory(messages, local)
        self.residuals = Residuals([0] * len(layers), device.zeros)
        self.fields = Fields(len(layers), device.zeros)
        self.learning_rate = 0.0  # learning rate of the last accepted step; 0: not known
        #: What became of this rank's last exchange, for the next one to tell the others; 0: there was none.
        self.outcome = 0
        self._digests: Future[Digests] | None = None
        #: Digests of the parameters that were last compared, one row per rank.
        self.digest_table: npt.NDArray[np.uint32] | None = None
        self.statistics = Statistics()
        self.reduced_statistics: Statistics | None = None
        self.trace = Trace(config.trace_spans, transport.rank)
        self.result: StepResult | None = None
        self._allocate = allocate
        self._average = average
        self._on_complete = on_complete
        self._order_step = order_step
        self._schedule = schedule
        self._scheme = parse(config.reduction)
        #: How many ranks, the first ones, only serve; and how many train.
        self.servers = self._scheme.serving(transport.size)
        self.trainers = transport.size - self.servers
        self._discards = Discards()
        self._handing_over = False  # servers have to tell each other what they no longer own
        self._topology = topology or Topology.one_host(transport.size)
        self._network = network
        self._steering = Steering(controller, len(layers))
        assert self._topology.world == transport.size, f"{self._topology} is not of {transport.size} ranks"
        if self._scheme.name == AUTO and network is None and len(self._topology.leaders) > 1:
            raise ConfigError("reduction=auto needs measured constants of the network between the hosts")
        self._due: int | None = None  # the step of the schedule whose plan has not been proposed yet
        self.advances = 0  # rounds completed, for whoever watches over progress
        self._next_plan: Plan | None = None
        self._checksums = config.checksums and transport.checksums
        self.switch: Switch | None = None  # a change of compression that is not through
        self.streak = np.zeros(len(layers), dtype=np.int64)  # steps present (> 0) or absent (< 0) in a row
        self._numbers: tuple[Number, Number] | None = None  # the scale and the rate, until they are known
        self._scale = 1.0
        self._open_learning_rate = 0.0
        self._opened_at = 0.0
        self._running: Generator[Waiting, None, None] | None = None
        self._ready = 0  # this rank's vote
        self._votes: list[tuple[npt.NDArray[np.int64], BucketFlags]] = []  # of the buckets that have begun
        self._in_flight: list[InFlight] = []  # newest first
        self._ahead: InFlight | None = None  # the next bucket, if it was begun while another one waited
        self._position = (0, 0)
        self._stale = True
        self._arrangements = Arrangements()
        assert controller is None or not self.servers, (
            "the frontend refuses controllers beside dedicated servers"
        )
        if controller is not None and controller.environment.first_step == 0:
            self.plan = replace(controller.plan(plan), version=plan.version)
        self.layout = self._relayout()

    # -- the step, from outside ---------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether an exchange has begun and is not done."""
        return self._running is not None

    @property
    def position(self) -> tuple[int, int, int]:
        """(step, bucket, round) that this rank waits for, for messages about stalls; round -1: the bucket's layers."""
        return (self.step, *self._position)

    @property
    def serves(self) -> bool:
        """Whether this rank only serves."""
        return self.transport.rank < self.servers

    @property
    def controller(self) -> ControllerRun | None:
        """The running controller, if there is one."""
        return self._steering.controller

    @property
    def keeps_state(self) -> bool:
        """Whether compressors keep residuals or fields; the same on all ranks."""
        return bool(self.residuals.first.nbytes + self.fields.nbytes)

    @property
    def predicted_bytes(self) -> float:
        """Bytes that a rank sends per step as it is laid out, by formula, without headers."""
        return self._laid_out.predicted_bytes

    def open(
        self, scale: Number = 1.0, learning_rate: Number = 0.0, digests: Future[Digests] | None = None
    ) -> None:
        """Begin an exchange. An earlier one that was not committed is discarded.

        ``scale``: the loss scale that gradients carry; means come back in the same units, residuals are kept without.
        ``learning_rate``: for residuals that follow it; 0 if it is not known. The first bucket waits until
        both have come. ``digests``: of the layers' parameters, to be compared over the ranks at the end of the
        exchange; on all ranks or on none.
        """
        if self.is_open:
            raise StateError("an exchange is already open")
        if self.result is not None:
            self.discard()
        self.lay_out()
        self._digests = digests
        self._numbers = scale, learning_rate
        self.registry.open(self.layout)
        self._position = (0, -1)
        self._opened_at = perf_counter()
        self._steering.open(self.step, self._opened_at, len(self.layout.buckets))
        self._running = self._run()

    def poll(self) -> Waiting:
        """Do what can be done without blocking; say what is missing."""
        if self._running is None:
            return Waiting.NOTHING
        try:
            return next(self._running)
        except StopIteration:
            self._running = None
            return Waiting.NOTHING
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        """The exchange, if one is open, does not go on: wait until the device no longer uses its memory.

        Raises nothing: a device that has failed uses nothing any more, and one that hangs is not waited for.
        """
        driver = self.device.driver
        if driver is None or not self.is_open:
            return
        with suppress(Exception):
            event, deadline = driver.mark(driver.stream), perf_counter() + _LONGEST_FAREWELL_SECONDS
            while not driver.reached(event) and perf_counter() < deadline:
                sleep(1e-4)
        self._in_flight, self._ahead = [], None

    def commit(self, outcome: int = APPLIED) -> bool:
        """Accept the finished step: residuals take their new values, unless a value was not finite.

        ``outcome``: what the other ranks hear of it. Returns whether it was accepted; the same on all ranks.
        """
        if self.is_open or self.result is None:
            raise StateError("there is no finished exchange to commit")
        result, self.result = self.result, None
        self.outcome = outcome
        if result.finite:
            self._discards.accepted()
            self.residuals.commit(result.present & self._keeps_residual)
            self.fields.commit(result.present)
            self.learning_rate = self._open_learning_rate
            self._steering.commit(result.present)
            if self.switch is not None:
                self.switch.commit(self.laid_out_plan, result.present)
        else:
            self.statistics.skipped_steps += 1
        return result.finite

    def discard(self) -> None:
        """Forget the finished step; the state stays what it was before."""
        if self.is_open:
            raise StateError("the exchange is still under way")
        if self.result is not None and self.result.finite and self.keeps_state:
            self._discards.count(speaks=self.transport.rank == self.servers)
        self.result = None
        self.outcome = DISCARDED

    def propose(self, plan: Plan) -> None:
        """Vote for the next plan; it takes over at the step after the one in which all ranks hold it.

        StateError where a controller decides about plans.
        """
        if self._steering.decides(self.step):
            raise StateError("a controller decides about plans here")
        plan.check_covers(self.layers)
        if plan.version != self.plan.version + 1:
            raise ConfigError(f"the next plan must have version {self.plan.version + 1}, not {plan.version}")
        compressors_of(self.layers, plan)
        self._next_plan = plan

    def set_compression(self, target: Plan, later: Mapping[int, Plan]) -> None:
        """Go over to another plan, and to those in ``later`` at their steps; see :class:`Switch`.

        All ranks call it between the same two steps: the next step's headers tell whether they did, and the plan
        applies from the step after it. A controller and a schedule end with it. PlanMismatchError in the next step, on
        every rank that called, unless all did, for the same plans.
        """
        if self.is_open or self.result is not None:
            raise StateError("a step is open: the compression can be changed between steps only")
        self.lay_out()
        self.switch = Switch.ask(self.layers, target, later, self.residuals.first.lengths > 0, self.step)
        self._schedule, self._due = self.switch.schedule, None
        self._next_plan = self.switch.plan(self.plan.version + 1, self.plan)

    def lay_out(self) -> None:
        """Lay out for the next step now, if the last one changed what that depends on; second residuals move along."""
        if self._stale:
            self.layout = self._relayout()
        self._arrangements.age(self.step)

    def restore(
        self,
        step: int,
        order: Sequence[int],
        plan: Plan,
        cold: frozenset[int],
        sparse: frozenset[int],
        *,
        streak: Sequence[int] | None = None,
        residuals: Residuals | None = None,
        fields: Fields | None = None,
        learning_rate: float | None = None,
        switch: Switch | None = None,
    ) -> None:
        """Go on from elsewhere: a checkpoint, a pipeline with fewer layers. See :mod:`gradcomp.pipeline.snapshot`.

        ``residuals``, ``fields`` and ``learning_rate`` replace those that are here; without them these are kept.
        ``switch``: a change of compression that is not through; no controller decides beside it.
        """
        if self.is_open:
            raise StateError("an exchange is open")
        plan.check_covers(self.layers)
        self.step, self.order, self.plan = step, list(order), plan
        self.cold, self.sparse = cold, sparse
        self._next_plan, self.switch = None, switch
        if switch is not None:
            self._steering.stop()
            self._next_plan = None if switch.asked is None else switch.plan(plan.version + 1, plan)
        self.streak[:] = 0 if streak is None else streak
        if residuals is not None:
            self.residuals = residuals
        if fields is not None:
            self.fields = fields
        if learning_rate is not None:
            self.learning_rate = learning_rate
        self.result = None
        self.outcome = 0
        self.layout = self._relayout()

    # -- the step, inside ---------------------------------------------------------------------------------------

    def _run(self) -> Generator[Waiting, None, None]:
        """Tick t issues round 0 of bucket t, round 1 of bucket t-1, ...: a total order that all ranks share."""
        count = len(self.layers)
        self._votes, self._in_flight, self._ahead = [], [], None
        self._follow_schedule()
        while self._steering.overdue:
            yield Waiting.BACKGROUND
        self._ready = 1 if self._next_plan is not None or self._steering.ready else 0
        self._ready *= not self.serves
        if self._handing_over:
            yield from self._hand_over()
        while not self.config.overlap and not self.registry.flushed:
            yield Waiting.LAYERS
        for program in self._programs:
            number = program.bucket.number
            started, self._ahead = self._ahead, None
            if started is None:
                yield from self._complete(program.bucket)
                started = self._start(program)
            self._in_flight.insert(0, started)
            yield from self._prepared(started)
            started.issue(self.transport)
            if number == len(self._programs) - 1:
                self._steering.contribute(self.step, self.transport)
            yield from self._advance(self._in_flight[1:])
            while self._in_flight and not self.config.overlap:
                yield from self._advance(self._in_flight)
        if not self._programs:  # every layer is sparse
            if self._numbers is not None:
                yield from self._units(*self._numbers)
            self._steering.contribute(self.step, self.transport)
        while self._in_flight:
            yield from self._advance(self._in_flight)

        states = np.zeros(count, dtype=np.uint8)
        outcomes = 0
        for layers, bucket_flags in self._votes:
            states[layers] |= bucket_flags.states[:-1]
            outcomes |= bucket_flags.outcomes
        ready = self._votes[0][1].ready if self._votes else 0
        if self.switch is not None and self._votes:
            self.switch.check(self.step, ready, self.trainers, self.transport.rank)
        yield from self._finish(states, outcomes, bool(self._votes) and ready == self.trainers)

    def _complete(self, bucket: Bucket) -> Generator[Waiting, None, None]:
        """Until a bucket can be encoded."""
        while not self.registry.ready(bucket.number):
            self._position = (bucket.number, -1)
            self._meanwhile()
            yield Waiting.LAYERS
        if self.device.is_late:
            yield from self._gradients(bucket)
        if self._numbers is not None:
            yield from self._units(*self._numbers)

    def _prepared(self, bucket_in_flight: InFlight) -> Generator[Waiting, None, None]:
        """Until the flight's next round is due, or it is complete."""
        while (waiting := bucket_in_flight.prepare()) is not Waiting.NOTHING:
            self._position = (bucket_in_flight.number, bucket_in_flight.round)
            self._meanwhile(bucket_in_flight)
            self._look_ahead()
            yield waiting

    def _meanwhile(self, bucket_in_flight: InFlight | None = None) -> None:
        """Beside a device there is time for all flights but this one; nothing is issued."""
        if not self.device.is_late:
            return
        for other in self._in_flight:
            if other is not bucket_in_flight:
                other.prepare()

    def _look_ahead(self) -> None:
        """Beside a device, begin the next bucket if it is complete: one, since it takes memory."""
        if not self.device.is_late:
            return
        number = len(self._votes)
        if self._ahead is not None:
            self._ahead.prepare()
        elif number < len(self._programs) and self.config.overlap and self.registry.ready(number):
            program = self._programs[number]
            events = self._events(program.bucket)
            if self.device.reached(events):
                self.device.follow(events)
                self._ahead = self._start(program)
                self._ahead.prepare()

    def _events(self, bucket: Bucket) -> list[Any]:
        return [self.registry.events[layer] for layer in bucket.layers.tolist()]

    def _gradients(self, bucket: Bucket) -> Generator[Waiting, None, None]:
        """Until a device has computed the gradients of a bucket."""
        events = self._events(bucket)
        while not self.device.reached(events):
            self._meanwhile()
            yield Waiting.DEVICE
        self.device.follow(events)

    def _units(self, scale: Number, learning_rate: Number) -> Generator[Waiting, None, None]:
        """Until the loss scale and the learning rate are known: they are the step's own, whatever follows."""
        for number in (scale, learning_rate):
            while not isinstance(number, float | int) and not number.done():
                self._meanwhile()
                yield Waiting.DEVICE
        self._scale, self._open_learning_rate = _known(scale), _known(learning_rate)
        self._numbers = None

    def _follow_schedule(self) -> None:
        """Propose what is to begin at the next step: all ranks do, in the same step.

        If another plan is under way, the schedule's comes after it: as soon as it has taken over.
        """
        if self._schedule is not None and self._schedule(self.step + 1, 0) is not None:
            self._due = self.step + 1
        if self._next_plan is not None:
            return
        if self._schedule is not None and self._due is not None:
            plan, self._due = self._schedule(self._due, self.plan.version + 1), None
            if plan is not None and self.switch is not None:
                self.switch.target = plan
            elif plan is not None and plan.assignments != self.plan.assignments:
                self.propose(plan)
        if self.switch is not None:
            self._next_plan = self.switch.follow(self.plan, self.cold | self.sparse)

    def _start(self, program: BucketProgram) -> InFlight:
        """A bucket that can be encoded begins."""
        number = program.bucket.number
        self.registry.decide(program.bucket.layers)
        complete = self.registry.completed[number]
        self.trace.add("ready", self.step, number, self._opened_at, complete)
        self.trace.add("queue", self.step, number, complete, perf_counter())
        bucket_flags = BucketFlags(len(program.bucket.layers))
        self._votes.append((program.bucket.layers, bucket_flags))
        return InFlight(number, self._exchange(program, bucket_flags), self._completed)

    def _exchange(self, program: BucketProgram, bucket_flags: BucketFlags) -> Generator[Step, None, None]:
        draw = self._draw(self.step)
        header_id = HeaderId(self._check, self.step, program.bucket.number, self._checksums)
        outcome = 0 if self.serves else self.outcome
        states = np.append(self.registry.states[program.bucket.layers], np.uint8(outcome))
        world = self.trainers
        scale = 1.0 / self._scale
        ratio = (
            self.learning_rate / self._open_learning_rate
            if self.learning_rate and self._open_learning_rate
            else 1.0
        )
        divisor = float(world) if self._average else 1.0
        memory = StepMemory(
            program.bucket,
            self.step,
            bucket_flags,
            self.registry,
            self.residuals,
            self.fields,
            scale,
            world,
            divisor,
            self._allocate,
            self.trace,
            self.statistics,
        )
        self._steering.start(program.bucket.groups, memory, scale)
        # A reduction hands out means; a sum is N times that. An allreduce hands out the sum as it is.
        call = Call(
            header_id,
            draw,
            states,
            self._ready,
            self.transport.size,
            scale,
            self._scale * (1 if self._average else world),
            ratio,
        )
        context = Context(
            draw,
            world,
            scale,
            self._scale,
            divisor,
            rate_ratio=ratio,
            fields=self.fields,
            observations=self._steering.observations,
            servers=self.servers,
        )
        return program.run(call, context, memory, bucket_flags)

    def _completed(self, bucket: int, begin: float, end: float) -> None:
        """A round has come."""
        self.advances += 1
        self.trace.add("wire", self.step, bucket, begin, end)
        self.statistics.wire_seconds += end - begin
        self._steering.round_complete(bucket, end - begin)

    def _advance(self, in_flight: Sequence[InFlight]) -> Generator[Waiting, None, None]:
        """The next round of these flights, the newest first; those that are complete are flights no more."""
        for bucket_in_flight in list(in_flight):
            yield from self._prepared(bucket_in_flight)
            if not bucket_in_flight.issue(self.transport):
                self._in_flight.remove(bucket_in_flight)
                if self._on_complete is not None:
                    self._on_complete(self.layout.buckets[bucket_in_flight.number])

    def _collective(self, operation: Operation) -> Generator[Waiting, None, None]:
        yield from _completed(operation.issue(self.transport))

    def _finish(
        self, states: npt.NDArray[np.uint8], outcomes: int, all_ready: bool
    ) -> Generator[Waiting, None, None]:
        """Draw the conclusions that every rank draws from the same votes."""
        present = (states & PRESENT) != 0
        sparse = (states & SPARSE) != 0
        nonfinite = (states & ~np.uint8(PRESENT | SPARSE)) != 0
        self._position = (len(self._programs), 0)  # behind the last bucket
        if self.step == self._order_step and self.config.reorder:
            yield from self._agree_on_order()
        self._mark_cold(present)
        newly_sparse = frozenset(np.flatnonzero(sparse).tolist()) - self.sparse
        if newly_sparse:
            self.sparse |= newly_sparse
            self._stale = True
        if all_ready:
            all_ready = not (yield from self._swap_plan())
        if self._steering.sums is not None:
            yield from _completed(self._steering.sums)
        rate = self._open_learning_rate
        if self._steering.conclude(self.step, all_ready, self._laid_out, self.registry.completed, rate):
            assert self.controller is not None, "a controller chose"
            self.plan = self.controller.plan(self.plan)
            self._stale = True
        self.statistics.steps += 1
        self.statistics.wire_bytes = self.transport.bytes_sent
        self.statistics.dense_bytes += self._dense_bytes
        every = self.config.statistics_every_steps
        if every and (self.step + 1) % every == 0:
            vector = self.statistics.vector()
            yield from self._collective(AllReduce(vector))
            self.reduced_statistics = Statistics.mean(vector, self.transport.size)
        if self._digests is not None:
            yield from self._compare(self._digests)
        self.registry.release()
        self.result = StepResult(self.step, present, sparse, nonfinite, outcomes)
        self.step += 1

    def _agree_on_order(self) -> Generator[Waiting, None, None]:
        """Everyone takes the order in which the first rank's gradients arrived, of those that have any.

        What did not arrive keeps its place behind.
        """
        count = len(self.layers)
        order = np.zeros(count, dtype="<i4")
        if self.transport.rank == self.servers:
            arrived = self.registry.arrivals
            rest = sorted(set(range(count)) - set(arrived))
            order[:] = arrived + rest
        counts = [order.nbytes * (rank == self.servers) for rank in range(self.transport.size)]
        yield from self._collective(AllGather(order.view(np.uint8), counts))
        if not np.array_equal(np.sort(order), np.arange(count)):
            raise WireFormatError(
                f"rank {self.servers} sent an order that is not a permutation of the layers"
            )
        if order.tolist() != self.order:
            self.order = order.tolist()
            self._stale = True

    def _compare(self, future: Future[Digests]) -> Generator[Waiting, None, None]:
        """Every rank's digests of its parameters, zeros of one that has no say; the table is the same on all."""
        while not future.done():
            yield Waiting.BACKGROUND
        count, world = len(self.layers), self.transport.size
        table = np.zeros((world, count), dtype="<u4")
        numbers = future.result().numbers
        table[self.transport.rank, : len(numbers)] = numbers
        yield from self._collective(AllGather(table.reshape(-1).view(np.uint8), [4 * count] * world))
        self._digests, self.digest_table = None, table

    def _swap_plan(self) -> Generator[Waiting, None, bool]:
        """All ranks are ready: make sure that it is for the same plan, since message sizes follow from it.

        Whether there is a new plan; if not, all were ready for what their controllers do next.
        """
        mine, world = bytes(32), self.transport.size
        if self._next_plan is not None:
            mine = self._next_plan.digest(self.layers)
            mine = mine if self.switch is None else self.switch.digest(mine)
        digests = np.zeros((world, len(mine)), dtype=np.uint8)
        digests[self.transport.rank] = np.frombuffer(mine, dtype=np.uint8)
        yield from self._collective(AllGather(digests.reshape(-1), [len(mine)] * world))
        others = [rank for rank in range(world) if digests[rank].tobytes() != mine]
        if others:
            raise PlanMismatchError(
                f"plan {self.plan.version + 1} of rank {self.transport.rank} differs from that of rank "
                f"{', '.join(map(str, others))}; set_compression() takes the same arguments on every rank, between "
                "the same two steps"
            )
        if self._next_plan is None:
            return False
        self.plan, self._next_plan = self._next_plan, None
        if self.switch is not None:
            self.switch.accept(self.plan)
            self._steering.stop()
        self._stale = True
        return True

    def _mark_cold(self, present: Mask) -> None:
        """Layers absent everywhere move behind the others, so that they hold nobody up; present ones come back."""
        streak = self.streak
        streak[:] = np.where(present, np.maximum(streak, 0) + 1, np.minimum(streak, 0) - 1)
        limit = self.config.cold_after_steps
        cold = {i for i in self.cold if streak[i] < limit} | set(np.flatnonzero(streak <= -limit).tolist())
        if cold != self.cold:
            self.cold = frozenset(cold)
            self._stale = True

    # -- layout -------------------------------------------------------------------------------------------------

    def _relayout(self) -> Layout:
        """Buckets and their programs for the current plan, order, cold and sparse layers; state moves along."""
        order = tuple(i for i in self.order if i not in self.sparse)
        key = (self.plan.assignments, order, self.cold)
        found = self._arrangements.get(key, self.step, lambda: self._arrange(order))
        self._programs = found.programs
        self._check = zlib.crc32(found.fingerprint.digest(self.plan.version) + found.order)
        self.residuals.grow(found.sizes)
        self.fields.arrange(found.fields)
        # A layer may hold a residual from an earlier plan: what is not exchanged with feedback must not be swapped.
        self._keeps_residual = np.array(found.sizes) > 0
        self.residuals.own(found.ranges, self.trainers)
        if self.switch is not None and self.switch.asked is None:
            self.fields.forget(MOMENTUM)  # it began with another compressor
            if self.switch.is_over(self.plan):
                self.switch = None
        self._handing_over = self.servers > 0 and self.step > 0 and bool(self._keeps_residual.any())
        self._laid_out = found
        self._dense_bytes = found.dense_bytes
        self.laid_out_plan = self.plan
        self._stale = False
        return found.layout

    def _arrange(self, order: Sequence[int]) -> Arrangement:
        layout = build_layout(
            self.layers, self.plan, order, self.cold, self.config.slice_elements, self.device
        )
        rank, world = self.transport.rank, self.transport.size
        context = Context(self._draw(0), self.trainers, servers=self.servers)
        programs = [
            BucketProgram(bucket, rank, world, context, self._reduction, self._memory.messages)
            for bucket in layout.buckets
        ]
        compressors = compressors_of(self.layers, self.plan)
        ranges: list[Range] = []
        for program in programs:
            if program.reduction is not None:
                first = len(ranges)
                ranges += program.reduction.ranges
                program.reduction.assign(range(first, len(ranges)))
        pairs = [(layer, b) for layer, numbers in enumerate(layout.buckets_of) for b in numbers]
        travels = tuple(np.array(pairs, dtype=np.int64).reshape(-1, 2).T)
        position = np.zeros(len(self.layers), dtype=np.int64)
        np.maximum.at(position, *travels)
        sent = np.zeros(len(layout.buckets))
        for bucket in layout.buckets:
            for group in bucket.groups:
                sent[bucket.number] += sent_bytes(group, self._scheme, self._topology).sum()
        return Arrangement(
            layout,
            programs,
            Fingerprint(self.plan.assignments, self.layers),
            np.array(order, dtype="<i4").tobytes(),
            layout.residual_sizes(self.layers),
            [c.fields(layer, self.config.seed) for c, layer in zip(compressors, self.layers, strict=True)],
            ranges,
            2 * sum(self.layers[i].nbytes for i in order) * (world - 1) // world,
            travels,
            position,
            float(sent.sum()),
            by_layer(travels, sent, len(self.layers)),
        )

    def _draw(self, step: int) -> Draw:
        """Where this rank's draws are: those who train count from 0, then those who serve."""
        number = (self.transport.rank - self.servers) % self.transport.size
        return Draw(self.config.seed, step & 0xFFFFFFFF, number)

    def _hand_over(self) -> Generator[Waiting, None, None]:
        """What dedicated servers no longer own goes, exactly, to who does now: they have nothing else to send it with.

        What no server owns any more becomes a part of the first trainer's residual.
        """
        layers = np.flatnonzero(self._keeps_residual)
        held = self.residuals.first.load(layers) * np.float32(self.serves)
        yield from self._collective(AllReduce(held))
        if self.serves:
            self.residuals.take_over(layers, held, self.trainers)
        elif self.transport.rank == self.servers:
            owned = [program.owned_layers for program in self._programs]
            self.residuals.add(layers, held, np.isin(layers, np.concatenate(owned), invert=True))
        self._handing_over = False

    def _reduction(self, parts: Sequence[Part], layers: int, bucket: int) -> Reduction:
        """The configured reduction, or the cheapest, for one bucket."""
        scheme = self._scheme
        if scheme.name == AUTO:
            scheme = cheapest(parts, layers, self._topology, self._network)
        return make(scheme, parts, layers, self.transport.rank, self._topology, bucket, self._memory)


def _known(number: Number) -> float:
    return number if isinstance(number, float | int) else number.result()


def _completed(handle: Handle) -> Generator[Waiting, None, None]:
    while not handle.poll():
        yield Waiting.WIRE
