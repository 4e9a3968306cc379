"""The step protocol: buckets in an agreed order, one round of each at a time, flags, commit, changes of plan.

No threads and no sockets: the owner submits layers, polls until the step is done, and commits or discards it. N
pipelines over an in-process transport run N ranks in one thread.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from gradcomp.compress.base import MOMENTUM
from gradcomp.control.base import ControllerRun
from gradcomp.core.config import HOST_SLICE, Config
from gradcomp.core.errors import ConfigError, StateError, WireFormatError
from gradcomp.core.layers import LayerSpec, check_unique
from gradcomp.core.metrics import StepMetrics
from gradcomp.core.plan import Plan
from gradcomp.core.state import Fields, Residuals
from gradcomp.core.trace import WHOLE_STEP, Statistics, Trace
from gradcomp.exchange.arrivals import Arrivals
from gradcomp.exchange.compiled_plan import CompiledPlans, PlanCompiler, rehearse
from gradcomp.exchange.fingerprint import (
    NOTHING,
    DeferredFingerprint,
    Digests,
    Fingerprints,
    exchange_digests,
    exchange_fingerprints,
)
from gradcomp.exchange.layout import Layout, Ordering
from gradcomp.exchange.memory import Allocate
from gradcomp.exchange.plans import Plans, Switch
from gradcomp.exchange.priorities import Priorities
from gradcomp.exchange.settings import Settings
from gradcomp.exchange.step import StepExchange, StepResult, Waits
from gradcomp.exchange.step_times import StepTimes
from gradcomp.exchange.waiting import Number, Waiting, collective, until_complete
from gradcomp.kernels.codec import Draw
from gradcomp.kernels.step import StepContext
from gradcomp.reduce.header import APPLIED, DIFFERENT, DISCARDED, EDITED, LATE
from gradcomp.transport.base import AllReduce, Handle, Transport

if TYPE_CHECKING:
    from gradcomp.exchange.layer_samples import LayerSamples

logger = logging.getLogger("gradcomp")
#: This many discarded exchanges in a row are no accident.
_MOST_DISCARDS = 3
#: :meth:`Pipeline.abandon` waits this long for a device; the kernels of a bucket take far less.
_LONGEST_FAREWELL_SECONDS = 5.0


class Pipeline:
    """Runs the steps of an exchanger on one rank.

    ``allocate(layer)`` allocates the mean of a layer that only other ranks had, and returns its address. Apart from
    the arrivals, methods are called by one thread at a time.
    """

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        plan: Plan,
        transport: Transport,
        config: Config,
        allocate: Allocate,
        settings: Settings | None = None,
    ) -> None:
        settings = settings or Settings()
        check_unique(layers)
        plan.check_covers(layers)
        self.layers = tuple(layers)
        self.plan = plan
        self.transport = transport
        # The ranks of a job have agreed on slice_elements before; who makes a pipeline by hand gets the host's default.
        self.config = config if config.slice_elements else replace(config, slice_elements=HOST_SLICE)
        self.step = 0
        self.ordering = Ordering(len(layers), config.cold_after_steps)
        self.device = device = settings.device
        self.arrivals = Arrivals(self.layers, device)
        self._compiler = PlanCompiler(self.layers, self.config, transport, settings)
        self.allocate = allocate
        self.listener = settings.listener
        self.preemption = settings.preemption
        self.slices_chosen = settings.slices_chosen
        self.residuals = Residuals([0] * len(layers), device.zeros)
        self.fields = Fields(len(layers), device.zeros)
        #: For ``divide="active"``: True on a rank that trains, False on one that has joined. None: means are over all.
        self.trains: bool | None = None
        #: The number of ranks that trained in the last step, if it was counted; else 0.
        self.active = 0
        self.learning_rate = 0.0  # learning rate of the last accepted step; 0: not known
        #: The outcome of this rank's last exchange, which the next one's headers carry; 0 if there was none.
        self.outcome = 0
        #: LATE and EDITED, if this rank's last exchange was; the next one's headers carry EDITED.
        self.notices = 0
        #: The check value of the last exchange's means; 0 if there was none.
        self.results = 0
        #: The fingerprints of all ranks, if the last exchange found that some differ.
        self.fingerprints: Fingerprints | None = None
        self._digests: Future[Digests] | None = None
        #: The digests of the parameters that were last compared, one row per rank.
        self.digest_table: npt.NDArray[np.uint32] | None = None
        self.statistics = Statistics()
        self.reduced_statistics: Statistics | None = None
        self._metrics = StepMetrics(self.layers)
        self._ended: float | None = None  # when the last step's exchange ended
        self.trace = Trace(config.trace_spans, transport.rank)
        self.result: StepResult | None = None
        #: The times of steps, for rank 0's run log; None without one.
        self.times = (
            StepTimes(settings.times_every, self.statistics, transport) if settings.times_every else None
        )
        #: Measures layers for the run log; None without one, and on ranks other than 0.
        self.samples: LayerSamples | None = None
        self._priorities = (
            Priorities(len(layers), settings.uses) if settings.uses is not None and config.reorder else None
        )
        #: The numbers of the layout's exchange buckets in the order in which they travel.
        self.travel: tuple[int, ...] = ()
        #: True if results are means over ranks, else sums.
        self.average = settings.average
        self._order_step = settings.order_step
        controller = settings.controller
        self.plans = Plans(self.layers, settings.schedule, controller)
        self._discards, self._warned = 0, False  # finished exchanges that were discarded in a row
        self.advances = 0  # rounds completed, from which the watchdog sees progress
        self.checksums = config.checksums and transport.checksums
        self._exchange: StepExchange | None = None  # of the open step, or of the last one
        self._running: Waits | None = None
        #: Until this collective is complete, :meth:`poll` can do nothing; the engine polls it alone meanwhile.
        self.awaited: Handle | None = None
        #: True once a plan with fake compression was in force: the model is worthless.
        self.has_faked = False
        self._stale = True
        self._compiled_plans = CompiledPlans()
        if controller is not None and controller.environment.first_step == 0:
            self.plan = replace(controller.plan(plan), version=plan.version)
        self.layout = self._relayout()

    # -- the step, from outside ---------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Return whether an exchange has begun and is not done."""
        return self._running is not None

    @property
    def position(self) -> tuple[int, int, int]:
        """Return the (step, bucket, round) that this rank waits for, for messages about stalls.

        Round -1 stands for the gradients of the bucket's layers.
        """
        return (self.step, *(self._exchange.position if self._exchange else (0, 0)))

    @property
    def controller(self) -> ControllerRun | None:
        """Return the running controller, or None."""
        return self.plans.controller

    def metrics(self) -> dict[str, float]:
        """Return numbers for loggers, see :meth:`gradcomp.job.report.Readers.compression_metrics`."""
        return self._metrics.read(self.statistics, self.plan.version)

    @property
    def predicted(self) -> npt.NDArray[np.float64]:
        """Return, by layer, the bytes that a rank sends per step in this layout, by formula, without headers."""
        return self.laid_out.predicted

    @property
    def momenta(self) -> npt.NDArray[np.float64]:
        """Return each layer's factor of momentum before compression, or NaN for the optimizer's.

        Rows of sparse gradients are exchanged another way, without momentum.
        """
        momenta = self.laid_out.momenta.copy()
        momenta[list(self.ordering.sparse)] = 0.0
        return momenta

    def open(
        self,
        scale: Number = 1.0,
        learning_rate: Number = 0.0,
        digests: Future[Digests] | None = None,
        fingerprint: DeferredFingerprint = NOTHING,
        momenta: npt.NDArray[np.float64] | None = None,
    ) -> None:
        """Begin an exchange, and discard an earlier one that was not committed.

        ``scale`` is the loss scale that gradients carry: means come back in the same units, and residuals are kept
        without it. ``learning_rate`` is for residuals that follow it, 0 if it is not known. ``fingerprint`` goes
        into every header. The first bucket waits until all three are computed. ``digests``, of the layers' parameters,
        are compared over the ranks at the end of the exchange; all ranks pass them, or none. ``momenta`` is the
        optimizer's momentum, by layer; ConfigError is raised if a compressor needs it and it is None.
        """
        if self._running is not None:
            raise StateError("an exchange is already open")
        if self.result is not None:
            self.discard()
        if self._stale:
            self.lay_out()
        self._compiled_plans.age(self.step)
        if momenta is None and np.isnan(self.laid_out.momenta).any():
            raise ConfigError(
                'momentum="optimizer" takes the factor of an optimizer, and none is known here: give a number instead'
            )
        self._digests = digests
        context = self._context(momenta)
        self._exchange = StepExchange(self, context, (scale, learning_rate), fingerprint)
        self._running, self.awaited = self._exchange.run(), None

    def poll(self) -> Waiting:
        """Do what can be done without blocking; return what is missing."""
        if self._running is None:
            return Waiting.NOTHING
        self.awaited = None
        try:
            waiting = next(self._running)
        except StopIteration:
            self._running = None
            return Waiting.NOTHING
        except BaseException:
            self.let_go()
            raise
        if isinstance(waiting, Waiting):
            return waiting
        self.awaited = waiting
        return Waiting.WIRE

    def let_go(self) -> None:
        """Release the arrays of an exchange that has failed; only the thread that polls may call it."""
        if self._running is not None:
            self._running.close()
        self.awaited = None
        self.abandon()

    def abandon(self) -> None:
        """Give up the open exchange, if there is one, and wait until the device no longer uses its memory.

        It raises nothing. A device that has failed uses no memory any more, and one that hangs is waited for
        briefly.
        """
        if self.device.driver is not None and self.is_open and self._exchange is not None:
            self.device.outlast(_LONGEST_FAREWELL_SECONDS)
            self._exchange = None

    def flush(self, *, late: bool = False) -> None:
        """Complete the step's buckets: no more layers will report.

        ``late`` says that it is not this rank's own gradients that end the exchange. Other ranks have their means
        before this rank has, and the headers tell them so.
        """
        exchange = self._exchange
        # It is None once the engine's thread has abandoned the step; the wait raises its error.
        if exchange is not None:
            exchange.late = late
        self.arrivals.flush()

    def commit(self, outcome: int = APPLIED, *, edited: bool = False) -> bool:
        """Accept the finished step: residuals take their new values, unless a value was not finite.

        ``outcome`` is what the other ranks are told; ``edited`` says that the means were changed after the
        exchange. It returns whether the step was accepted, which is the same on all ranks.
        """
        if self._running is not None or self.result is None:
            raise StateError("there is no finished exchange to commit")
        assert self._exchange is not None, "its result is here"
        result, self.result = self.result, None
        self.outcome, self.notices = outcome, LATE * self._exchange.late | EDITED * edited
        finite = result.finite
        if finite:
            self._discards = 0
            begin = perf_counter()
            if self.keeps_state:
                self.residuals.commit(result.present & self._keeps_residual)
                self.fields.commit(result.present)
            self.trace.add(("feedback", result.step, WHOLE_STEP, begin, perf_counter()))
            self.learning_rate = self._exchange.learning_rate
            self.plans.commit(self.laid_out_plan, result.present)
        else:
            self.statistics.skipped_steps += 1
        return finite

    def outlast_digests(self) -> None:
        """Wait until digests of the parameters are taken, if the open exchange compares them: then they may change."""
        if (digests := self._digests) is not None:
            wait([digests])

    def discard(self) -> None:
        """Discard the finished step; the state does not change."""
        if self.is_open:
            raise StateError("the exchange is still under way")
        if self.result is not None and self.result.finite and self.keeps_state:
            self._count_discard()
        self.result = None
        self.outcome, self.notices = DISCARDED, 0

    def _count_discard(self) -> None:
        """Warn once if several exchanges in a row, whose state was not kept, were discarded."""
        self._discards += 1
        if self._discards < _MOST_DISCARDS or self._warned:
            return
        self._warned = True
        if self.transport.rank == 0:
            logger.warning(
                "the means of the last %d exchanges were never applied by step(), so their residuals and momentum were "
                "not kept: without error feedback, what compression leaves out is lost. Update parameters with the "
                "optimizer's step(), not by hand, or compress without feedback",
                _MOST_DISCARDS,
            )

    def propose(self, plan: Plan) -> None:
        """Vote for the next plan, which applies from the step after the one in which all ranks hold it.

        It raises StateError where a controller decides about plans.
        """
        if self.plans.decides(self.step):
            raise StateError("a plan cannot be proposed here, since a controller decides about plans")
        self.plans.propose(plan, self.plan)

    def set_compression(self, target: Plan, later: Mapping[int, Plan]) -> None:
        """Change to another plan, and to those in ``later`` at their steps, by way of a :class:`Switch`.

        All ranks call it between the same two steps: the next step's headers tell whether they did, and the plan
        applies from the step after it. A controller and a schedule end with it. The next step raises
        PlanMismatchError, on every rank that called, unless all did, for the same plans.
        """
        if self.is_open or self.result is not None:
            raise StateError("a step is open: the compression can be changed between steps only")
        self.lay_out()
        self.plans.change(target, later, self.residuals.first.lengths > 0, self.step, self.plan)

    def lay_out(self) -> None:
        """Make the next step's layout now, if the last step changed it; server-side errors move along."""
        if self._stale:
            self.layout = self._relayout()

    def restore(
        self,
        step: int,
        plan: Plan,
        order: Sequence[int],
        *,
        cold: frozenset[int] = frozenset(),
        sparse: frozenset[int] = frozenset(),
        streak: Sequence[int] | None = None,
        residuals: Residuals | None = None,
        fields: Fields | None = None,
        learning_rate: float | None = None,
        switch: Switch | None = None,
        slice_elements: int | None = None,
    ) -> None:
        """Continue from a saved state; see :mod:`gradcomp.exchange.snapshot`.

        Layers are given by number. ``slice_elements`` is another size of exchange buckets. ``residuals``, ``fields``
        and ``learning_rate`` replace the pipeline's own, which are kept where these are None. ``switch`` is an
        unfinished change of compression, which ends the controller.
        """
        if self.is_open:
            raise StateError("an exchange is open")
        plan.check_covers(self.layers)
        self.step, self.plan = step, plan
        if slice_elements is not None:
            self.config = replace(self.config, slice_elements=slice_elements)
            self._compiler.slice_elements, self._compiled_plans = slice_elements, CompiledPlans()
        self.ordering.restore(order, cold, sparse, streak)
        self.plans.restore(switch, plan)
        if switch is not None:
            self.plans.controller = None
        self.residuals = self.residuals if residuals is None else residuals
        self.fields = self.fields if fields is None else fields
        self.learning_rate = self.learning_rate if learning_rate is None else learning_rate
        self.result = None
        self._exchange = None
        self.outcome = self.notices = self.results = 0
        self.layout = self._relayout()

    # -- the step, inside ---------------------------------------------------------------------------------------

    def _context(self, momenta: npt.NDArray[np.float64] | None = None) -> StepContext:
        """Return the next step's context without the loss scale and the learning rate, which come later."""
        draw = Draw(self.config.seed, self.step & 0xFFFFFFFF, self.transport.rank)
        return StepContext(
            draw,
            self.transport.size,
            average=self.average,
            momenta=momenta,
            fields=self.fields,
            number=self.step,
        )

    def round_complete(self, seconds: float) -> None:
        """Count a round that took ``seconds`` on the wire, of a step or between two."""
        self.advances += 1
        self.statistics.wire_seconds += seconds

    def count_active(self, trains: bool) -> Generator[Waiting, None, None]:
        """Count the ranks that train in this step. Wire: one number."""
        count = np.full(1, trains, dtype=np.float32)
        yield from collective(AllReduce(count), self.transport)
        if count[0] not in range(self.transport.size + 1):
            raise WireFormatError(f"{count[0]} of {self.transport.size} ranks train, which is impossible")
        self.active = int(count[0])

    def contribute(self) -> None:
        """Start the sums and gathers of a step that are under way together with its last bucket."""
        self.plans.contribute(self.step, self.transport)
        if self.times is not None:
            self.times.issue()

    def end_step(self, exchange: StepExchange) -> Generator[Waiting, None, None]:
        """Conclude the step, as every rank does from the same flags."""
        result, all_ready = exchange.result()
        self.results = result.results
        if result.notices & DIFFERENT:
            self.fingerprints = yield from exchange_fingerprints(
                self.transport, len(self.layers), exchange.fingerprint
            )
        if self.laid_out.programs and self.plans.switch is not None:
            self.plans.check(self.step, all_ready, self.transport.rank)
        if self.step == self._order_step and self.config.reorder:
            is_new = yield from self.ordering.agree(self.transport, self.arrivals.order)
            self._stale |= is_new
        if self._priorities is not None:
            times = exchange.opened_at, np.array(self.arrivals.completed), exchange.ended
            if (yield from self._priorities.after_step(self.layout, self.travel, *times, self.transport)):
                self.travel = self._priorities.order(self.layout)
        self._stale |= self.ordering.seen(result.present, result.sparse)
        if all_ready:
            # Message sizes follow from the plan. Without one, the ranks are ready for their controllers' choices.
            yield from self.plans.compare(self.transport, self.plan.version + 1)
        if self.plans.sums is not None:
            yield from until_complete(self.plans.sums)
        if self.times is not None:
            yield from self.times.gather()
        completed, rate = self.arrivals.completed, exchange.learning_rate
        plan = self.plans.next(self.step, all_ready, self.plan, self.laid_out, completed, rate)
        if plan is not None:
            self.plan, self._stale = plan, True
        self._count_step(exchange.opened_at)
        every = self.config.statistics_every_steps
        if every and (self.step + 1) % every == 0:
            vector = self.statistics.vector()
            yield from collective(AllReduce(vector), self.transport)
            self.reduced_statistics = Statistics.mean(vector, self.transport.size)
        if self._digests is not None:
            self.digest_table = yield from exchange_digests(self.transport, len(self.layers), self._digests)
            self._digests = None
        self.arrivals.release()
        self.result = result
        self.step += 1

    def _count_step(self, opened_at: float) -> None:
        since, self._ended = self._ended or opened_at, perf_counter()
        with self._metrics.lock:
            self.statistics.steps += 1
            self.statistics.wire_bytes = self.transport.bytes_sent
            self.statistics.dense_bytes += self.laid_out.dense_bytes
            self.statistics.step_seconds += self._ended - since

    # -- layout -------------------------------------------------------------------------------------------------

    def _relayout(self) -> Layout:
        """Return the layout of the current plan, order, cold and sparse layers; the state moves along."""
        order, cold = self.ordering.travelling, self.ordering.cold
        key = (self.plan.assignments, order, cold)
        is_new = key not in self._compiled_plans
        found = self._compiled_plans.get(
            key, self.step, lambda: self._compiler.compile(self.plan, order, cold)
        )
        #: The check value of plan and layout in headers.
        self.header_check = zlib.crc32(found.fingerprint.digest(self.plan.version) + found.order)
        self.residuals.grow(found.sizes)
        self.fields.arrange(found.fields)
        # A layer may hold a residual from an earlier plan. Its buffers are swapped only where this plan has feedback.
        self._keeps_residual = np.array(found.sizes) > 0
        self.residuals.own(found.ranges, self.transport.size)
        if self.plans.switch is not None and self.plans.switch.asked is None:
            self.fields.forget(MOMENTUM)  # another compressor has accumulated it
        #: True if compressors keep residuals or fields; equal on all ranks.
        self.keeps_state = bool(self.residuals.first.nbytes + self.fields.nbytes)
        self.plans.laid_out(self.plan)
        self.travel = tuple(range(len(found.layout.buckets)))
        if self._priorities is not None:
            self.travel = self._priorities.order(found.layout)
        self.laid_out = found
        self.has_faked |= found.fakes
        self.laid_out_plan = self.plan
        self._stale = False
        if is_new:
            rehearse(found.programs, self.device, self.layers, self._context(), self.residuals)
        return found.layout
