"""The step protocol: buckets in an agreed order, one round of each per tick, flags, commit, changes of plan.

No threads and no sockets: the owner submits layers, polls until the step is done, and commits or discards it. N
pipelines over an in-process transport run N ranks in one thread.
"""

from __future__ import annotations

import zlib
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from time import perf_counter, sleep

import numpy as np
import numpy.typing as npt

from gradcomp.compress.base import MOMENTUM
from gradcomp.control.base import ControllerRun
from gradcomp.core.config import HOST_SLICE, Config
from gradcomp.core.errors import ConfigError, StateError
from gradcomp.core.layers import LayerSpec, check_unique
from gradcomp.core.plan import Plan
from gradcomp.core.state import Fields, Residuals
from gradcomp.core.statistics import Statistics, Trace
from gradcomp.core.topology import Topology
from gradcomp.kernels.cuda.mirrors import mirror
from gradcomp.kernels.step import Observations, StepContext
from gradcomp.pipeline.arrangement import Arrangements, Arranger
from gradcomp.pipeline.bucket import BucketProgram
from gradcomp.pipeline.conclusions import agree_on_order, check_same_plan, collective, compare, completed
from gradcomp.pipeline.digests import Digests
from gradcomp.pipeline.discards import Discards
from gradcomp.pipeline.gradient_registry import GradientRegistry
from gradcomp.pipeline.in_flight import InFlight, Waiting
from gradcomp.pipeline.layout import Layout
from gradcomp.pipeline.memory import Allocate, StepMemory, Times
from gradcomp.pipeline.options import Options, Resumption
from gradcomp.pipeline.ordering import Ordering
from gradcomp.pipeline.rehearsal import rehearse
from gradcomp.pipeline.result import StepResult
from gradcomp.pipeline.soon import Number
from gradcomp.pipeline.steering import Steering
from gradcomp.pipeline.succession import Succession
from gradcomp.pipeline.ticks import Ticks
from gradcomp.reduce.base import Memory
from gradcomp.reduce.framing import Framed
from gradcomp.reduce.header import (
    APPLIED,
    DISCARDED,
    PRESENT,
    READY,
    SPARSE,
    WAITING,
    BucketFlags,
    HeaderId,
)
from gradcomp.transport.base import AllReduce, Transport, host_allocator

Mask = npt.NDArray[np.bool_]

#: What kernels of a bucket take is far below it.
_LONGEST_FAREWELL_SECONDS = 5.0


class Pipeline:
    """One rank's side of an exchanger.

    ``allocate(layer)`` makes room for the mean of a layer that only other ranks had. Apart from the gradient registry,
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
        options: Options | None = None,
    ) -> None:
        options = options or Options()
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
        self.ordering = Ordering(len(layers), config.cold_after_steps)
        self.registry = GradientRegistry(self.layers)
        self.device = device = options.device
        topology = options.topology or Topology.one_host(transport.size)
        assert topology.world == transport.size, f"{topology} is not of {transport.size} ranks"
        messages = transport.allocator(device)
        local = messages
        if device.driver is not None and messages is host_allocator:
            local = partial(mirror, device.driver)
        self._arranger = Arranger(
            self.layers,
            self.config,
            device,
            Memory(messages, local),
            transport.rank,
            topology,
            options.network,
        )
        self.servers, self.trainers = self._arranger.servers, self._arranger.trainers
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
        self._average = options.average
        self._on_complete = options.on_complete
        self._order_step = options.order_step
        self.plans = Succession(self.layers, options.schedule)
        self._discards = Discards()
        self._handing_over = False  # servers have to tell each other what they no longer own
        controller = options.controller
        self._steering = Steering(controller, len(layers))
        self.advances = 0  # rounds completed, for whoever watches over progress
        self._checksums = config.checksums and transport.checksums
        self._numbers: tuple[Number, Number] | None = None  # the scale and the rate, until they are known
        self._scale = 1.0
        self._open_learning_rate = 0.0
        self._opened_at = 0.0
        self._running: Generator[Waiting, None, None] | None = None
        self._own_state = 0  # what this rank says of itself in this step
        self._flags: list[tuple[npt.NDArray[np.int64], BucketFlags]] = []  # of the buckets that have begun
        self._ticks: Ticks | None = None
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
        return (self.step, *(self._ticks.position if self._ticks else (0, 0)))

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
    def predicted(self) -> npt.NDArray[np.float64]:
        """By layer, bytes that a rank sends per step as it is laid out, by formula, without headers."""
        return self._laid_out.predicted

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
        self._ticks = Ticks(
            self._programs,
            self.registry,
            self.device,
            self.transport,
            self._start,
            self._on_complete,
            (scale, learning_rate),
        )
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
        self._ticks = None

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
            if self.plans.switch is not None:
                self.plans.switch.commit(self.laid_out_plan, result.present)
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
        self.plans.propose(plan, self.plan)

    def set_compression(self, target: Plan, later: Mapping[int, Plan]) -> None:
        """Go over to another plan, and to those in ``later`` at their steps; see :class:`Switch`.

        All ranks call it between the same two steps: the next step's headers tell whether they did, and the plan
        applies from the step after it. A controller and a schedule end with it. PlanMismatchError in the next step, on
        every rank that called, unless all did, for the same plans.
        """
        if self.is_open or self.result is not None:
            raise StateError("a step is open: the compression can be changed between steps only")
        self.lay_out()
        self.plans.ask(target, later, self.residuals.first.lengths > 0, self.step, self.plan)

    def lay_out(self) -> None:
        """Lay out for the next step now, if the last one changed what that depends on; second residuals move along."""
        if self._stale:
            self.layout = self._relayout()
        self._arrangements.age(self.step)

    def restore(self, state: Resumption) -> None:
        """Go on from elsewhere; see :mod:`gradcomp.pipeline.snapshot`."""
        if self.is_open:
            raise StateError("an exchange is open")
        state.plan.check_covers(self.layers)
        self.step, self.plan = state.step, state.plan
        self.ordering.restore(state.order, state.cold, state.sparse, state.streak)
        self.plans.restore(state.switch, state.plan)
        if state.switch is not None:
            self._steering.stop()
        if state.residuals is not None:
            self.residuals = state.residuals
        if state.fields is not None:
            self.fields = state.fields
        if state.learning_rate is not None:
            self.learning_rate = state.learning_rate
        self.result = None
        self.outcome = 0
        self.layout = self._relayout()

    # -- the step, inside ---------------------------------------------------------------------------------------

    def _run(self) -> Generator[Waiting, None, None]:
        assert self._ticks is not None, "made when the step was opened"
        self._flags = []
        self.plans.follow(self.step, self.plan, self.ordering.cold | self.ordering.sparse)
        while self._steering.overdue:
            yield Waiting.BACKGROUND
        ready = self.plans.next is not None or self._steering.ready
        self._own_state = 0 if self.serves else self.outcome | (READY if ready else WAITING)
        if self._handing_over:
            yield from self._hand_over()
        contribute = partial(self._steering.contribute, self.step, self.transport)
        yield from self._ticks.run(overlap=self.config.overlap, last_is_issued=contribute)
        self._take_numbers()
        states = np.zeros(len(self.layers), dtype=np.uint8)
        outcomes = 0
        for layers, flags in self._flags:
            states[layers] |= flags.states[:-1]
            outcomes |= flags.outcomes
        ready = bool(self._flags) and self._flags[0][1].ready
        if self.plans.switch is not None and self._flags:
            self.plans.switch.check(self.step, ready, self.transport.rank)
        yield from self._finish(states, outcomes, ready)

    def _start(self, program: BucketProgram) -> InFlight:
        """A bucket that can be encoded begins."""
        self._take_numbers()
        number = program.bucket.number
        self.registry.decide(program.bucket.layers)
        complete = self.registry.completed[number]
        self.trace.add("ready", self.step, number, self._opened_at, complete)
        self.trace.add("queue", self.step, number, complete, perf_counter())
        states = np.append(self.registry.states[program.bucket.layers], np.uint8(self._own_state))
        flags = BucketFlags(states)
        self._flags.append((program.bucket.layers, flags))
        return InFlight(number, self._exchange(program, flags), self._completed)

    def _exchange(self, program: BucketProgram, flags: BucketFlags) -> Generator[Framed, None, None]:
        bucket, old, new = program.bucket, self.learning_rate, self._open_learning_rate
        ratio = old / new if old and new else 1.0
        context = self._context(self._scale, ratio, self._steering.observations)
        times = Times(self.trace, self.statistics)
        memory = StepMemory(bucket, context, flags, self.registry, self.residuals, self._allocate, times)
        self._steering.start(bucket.groups, memory, context.scale)
        header_id = HeaderId(self._check, self.step, bucket.number, self._checksums)
        return program.run(header_id, context, memory, flags)

    def _context(
        self, scale: float, rate_ratio: float, observations: Observations | None = None
    ) -> StepContext:
        return StepContext(
            self._arranger.draw(self.step),
            self.trainers,
            self.servers,
            scale=1.0 / scale,
            unscale=scale,
            average=self._average,
            rate_ratio=rate_ratio,
            fields=self.fields,
            observations=observations,
            number=self.step,
        )

    def _completed(self, bucket: int, begin: float, end: float) -> None:
        """A round has come."""
        self.advances += 1
        self.trace.add("wire", self.step, bucket, begin, end)
        self.statistics.wire_seconds += end - begin
        self._steering.round_complete(bucket, end - begin)

    def _finish(
        self, states: npt.NDArray[np.uint8], outcomes: int, all_ready: bool
    ) -> Generator[Waiting, None, None]:
        """Draw the conclusions that every rank draws from the same flags."""
        present = (states & PRESENT) != 0
        sparse = (states & SPARSE) != 0
        nonfinite = (states & ~np.uint8(PRESENT | SPARSE)) != 0
        if self.step == self._order_step and self.config.reorder:
            yield from self._take_order()
        self._stale |= self.ordering.seen(present, sparse)
        if all_ready:
            all_ready = not (yield from self._swap_plan())
        if self._steering.sums is not None:
            yield from completed(self._steering.sums)
        rate = self._open_learning_rate
        if self._steering.conclude(self.step, all_ready, self._laid_out, self.registry.completed, rate):
            assert self.controller is not None, "a controller chose"
            self.plan = self.controller.plan(self.plan)
            self._stale = True
        self.statistics.steps += 1
        self.statistics.wire_bytes = self.transport.bytes_sent
        self.statistics.dense_bytes += self._laid_out.dense_bytes
        every = self.config.statistics_every_steps
        if every and (self.step + 1) % every == 0:
            vector = self.statistics.vector()
            yield from collective(AllReduce(vector), self.transport)
            self.reduced_statistics = Statistics.mean(vector, self.transport.size)
        if self._digests is not None:
            self.digest_table = yield from compare(self.transport, len(self.layers), self._digests)
            self._digests = None
        self.registry.release()
        self.result = StepResult(self.step, present, sparse, nonfinite, outcomes)
        self.step += 1

    def _take_order(self) -> Generator[Waiting, None, None]:
        """Everyone takes the order in which the first trainer's gradients arrived."""
        arrived = self.registry.arrivals
        order = yield from agree_on_order(self.transport, len(self.layers), self.servers, arrived)
        self._stale |= self.ordering.take(order)

    def _swap_plan(self) -> Generator[Waiting, None, bool]:
        """All ranks are ready: make sure that it is for the same plan, since message sizes follow from it.

        Whether there is a new plan; if not, all were ready for what their controllers do next.
        """
        yield from check_same_plan(self.transport, self.plans.digest(), self.plan.version + 1)
        plan = self.plans.take()
        if plan is None:
            return False
        self.plan = plan
        if self.plans.switch is not None:
            self._steering.stop()
        self._stale = True
        return True

    # -- layout -------------------------------------------------------------------------------------------------

    def _relayout(self) -> Layout:
        """Buckets and their programs for the current plan, order, cold and sparse layers; state moves along."""
        order, cold = self.ordering.travelling, self.ordering.cold
        key = (self.plan.assignments, order, cold)
        is_new = key not in self._arrangements
        found = self._arrangements.get(key, self.step, lambda: self._arranger.arrange(self.plan, order, cold))
        self._programs = found.programs
        self._check = zlib.crc32(found.fingerprint.digest(self.plan.version) + found.order)
        self.residuals.grow(found.sizes)
        self.fields.arrange(found.fields)
        # A layer may hold a residual from an earlier plan: what is not exchanged with feedback must not be swapped.
        self._keeps_residual = np.array(found.sizes) > 0
        self.residuals.own(found.ranges, self.trainers)
        if self.plans.switch is not None and self.plans.switch.asked is None:
            self.fields.forget(MOMENTUM)  # it began with another compressor
        self.plans.laid_out(self.plan)
        self._handing_over = self.servers > 0 and self.step > 0 and bool(self._keeps_residual.any())
        self._laid_out = found
        self.laid_out_plan = self.plan
        self._stale = False
        if is_new:
            rehearse(found.programs, self.device, self.layers, self._context(1.0, 1.0), self.residuals)
        return found.layout

    def _take_numbers(self) -> None:
        """The loss scale and the learning rate have come."""
        if self._numbers is not None:
            self._scale, self._open_learning_rate = map(_known, self._numbers)
            self._numbers = None

    def _hand_over(self) -> Generator[Waiting, None, None]:
        """What dedicated servers no longer own goes, exactly, to who does now: they have nothing else to send it with.

        What no server owns any more becomes a part of the first trainer's residual.
        """
        layers = np.flatnonzero(self._keeps_residual)
        held = self.residuals.first.load(layers) * np.float32(self.serves)
        yield from collective(AllReduce(held), self.transport)
        if self.serves:
            self.residuals.take_over(layers, held, self.trainers)
        elif self.transport.rank == self.servers:
            owned = [program.owned_layers for program in self._programs]
            self.residuals.add(layers, held, np.isin(layers, np.concatenate(owned), invert=True))
        self._handing_over = False


def _known(number: Number) -> float:
    return number if isinstance(number, float | int) else number.result()
