"""An exchanger is one wrapped optimizer's side of the exchange; the engine's thread drives its steps."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from time import perf_counter
from typing import Protocol

import numpy as np
import numpy.typing as npt

from gradcomp.core.config import Config
from gradcomp.core.errors import GradcompError, StateError, WireFormatError
from gradcomp.core.layers import LayerSpec
from gradcomp.core.plan import Plan
from gradcomp.core.scheme import AUTO
from gradcomp.core.trace import WHOLE_STEP, profiler
from gradcomp.exchange.agreement import agree_on_settings
from gradcomp.exchange.arrivals import Submission
from gradcomp.exchange.fingerprint import NOTHING, DeferredFingerprint
from gradcomp.exchange.memory import Allocate
from gradcomp.exchange.pipeline import Pipeline
from gradcomp.exchange.reports import measure, shift
from gradcomp.exchange.request_group import RequestGroup, RequestOrder, Run
from gradcomp.exchange.requests import Array, PreparedRequest, Request, SharedMemory
from gradcomp.exchange.run_log import RunLog
from gradcomp.exchange.settings import Settings
from gradcomp.exchange.step import StepResult
from gradcomp.exchange.thread import Engine, Progress
from gradcomp.exchange.waiting import Number
from gradcomp.exchange.watchdog import Watchdog
from gradcomp.kernels.devices import HOST, Device
from gradcomp.reduce.base import Memory
from gradcomp.reduce.header import APPLIED
from gradcomp.transport.base import Transport


class Recorder(Protocol):
    """Looks at gradients before they are encoded; called on the threads that drive the exchange, one at a time."""

    def begin(self, step: int) -> None:
        """Take note that an exchange begins."""

    def take(self, submission: Submission) -> None:
        """Look at a gradient that is ready and will be submitted to the engine next."""

    def end(self) -> None:
        """End an exchange that is done on all ranks; may use collectives."""

    def close(self) -> None:
        """End, since no further exchange will come. Raises nothing."""


class Exchanger:
    """Exchanges the gradients of a fixed list of layers, step after step.

    Construction is collective: the ranks first compare layers, plan, settings and the arguments of the frontend,
    and every rank raises PlanMismatchError if they differ. The training thread opens a step, submits layers to
    ``pipeline.arrivals``, flushes and waits; the engine's thread does the rest, see :class:`Progress`. After a failure
    every call that opens, waits for or accepts a step, or communicates between steps, raises the same error.
    """

    def __init__(
        self,
        engine: Engine,
        layers: Sequence[LayerSpec],
        plan: Plan,
        transport: Transport,
        watchdog: Watchdog,
        config: Config,
        allocate: Allocate,
        settings: Settings | None = None,
    ) -> None:
        wait_for = watchdog.patient(config, "the other ranks to compare layers and settings")
        config, settings, journal = agree_on_settings(
            layers, plan, transport, config, settings or Settings(), wait_for
        )
        self._config = config
        topology = settings.topology
        if topology is not None and config.reduction == AUTO and len(topology.leaders) > 1:
            settings = replace(settings, network=measure(transport, topology, wait_for))
        #: Between steps the training thread may read and change it.
        self.pipeline = Pipeline(layers, plan, transport, config, allocate, settings)
        self.pipeline.arrivals.bucket_complete = engine.wake
        roster = settings.roster
        #: The name among the job's exchangers, the same on all its ranks, and these ranks.
        self.name, self.ranks = settings.name, roster.ranks if roster else tuple(range(transport.size))
        self._engine = engine
        self._transport = transport
        self._digests = settings.digests
        self._fingerprint = settings.fingerprint if self.compares else None
        #: True if the other ranks may still wait for this rank's vote about the last exchange.
        self.owes_vote = False
        self._exchanges = 0  # begun so far; the same on all ranks, whatever their outcomes
        #: Called before each exchange but the first, with the number of those before it; it may use collectives.
        self.before_exchange: Callable[[int], None] | None = None
        #: Called when the job ends in good order, to finish a step that other ranks may still need.
        self.before_end: Callable[[], None] = lambda: None
        #: Looks at gradients, which the step driver shows it; all ranks have one, or none.
        self.recorder: Recorder | None = None
        self.closed = False
        self._aborted = False  # by this rank, which may leave the others in a collective
        self._pid = os.getpid()
        self._times = self.pipeline.times
        self._run_log: RunLog | None = None
        if transport.rank == 0 and (settings.controller is not None or journal is not None):
            self._run_log = RunLog(self.pipeline, journal, settings.controller_text, settings.compression)
        self._progress = Progress(engine, watchdog, config, self.pipeline, settings)
        self._group: RequestGroup | None = None
        self._order = RequestOrder()
        self._shared = SharedMemory(transport.allocator(HOST))

    @property
    def device(self) -> Device:
        """Return the device of the gradients."""
        return self.pipeline.device

    @property
    def compares(self) -> bool:
        """Return whether ranks compare fingerprints in every exchange; the same on all of them."""
        return bool(self._config.fingerprint_every_steps)

    @property
    def is_open(self) -> bool:
        """Return whether a step has begun that no thread has waited for."""
        return self._progress.is_open

    @property
    def error(self) -> GradcompError | None:
        """Return why the exchanger is unusable, or None."""
        return self._progress.error

    def open(
        self, scale: Number = 1.0, learning_rate: Number = 0.0, momenta: npt.NDArray[np.float64] | None = None
    ) -> None:
        """Begin an exchange; see :meth:`Pipeline.open`."""
        self._check()
        controller = self.pipeline.plans.controller
        if controller is not None and controller.wants_network:
            controller.hear(
                measure(self._transport, controller.environment.topology, self._progress.wait_for)
            )
        if self._exchanges and self.before_exchange is not None:
            self.before_exchange(self._exchanges)
        fingerprint: DeferredFingerprint = NOTHING
        if self._fingerprint is not None and self._exchanges:
            fingerprint = self._fingerprint(self.pipeline.step)
        begun, every = self._exchanges, self._config.fingerprint_every_steps
        due = 0 < begun <= self._config.fingerprint_steps or (every and begun and begun % every == 0)
        digests = self._digests() if self._digests and due else None
        self.pipeline.open(scale, learning_rate, digests, fingerprint, momenta)
        self._exchanges += 1
        if self._times is not None:
            self._times.opened(self.pipeline.step)
        self._progress.collectives = 0
        if self.recorder is not None:
            self.recorder.begin(self.pipeline.step)
        self._progress.begin()
        self._progress.is_open = True

    def flush(self, *, late: bool = False) -> None:
        """End the submissions of this step; see :meth:`Pipeline.flush`."""
        self.pipeline.flush(late=late)
        self._engine.wake()

    def waited_for(self) -> AbstractContextManager[None]:
        """Return the context of a wait for means of the open step other than :meth:`wait`."""
        return self._progress.watchdog.callers.waiting(self._progress)

    def wait(self) -> StepResult:
        """Block until the step is done; the means are then in the outputs."""
        begin, end_range = perf_counter(), profiler.begin("wait") if profiler.records() else None
        try:
            self._progress.wait()
        finally:
            if end_range is not None:
                end_range()
        end = perf_counter()
        self.pipeline.statistics.exposed_seconds += end - begin
        self._progress.is_open = False
        self._check()
        if self._times is not None:
            self._times.waited()
        result = self.pipeline.result
        assert result is not None, "a step that is done has a result"
        self.pipeline.preemption.hear(result.notices)
        self.pipeline.trace.add(("wait", result.step, WHOLE_STEP, begin, end))
        if self.recorder is not None:
            self.recorder.end()
        return result

    def commit(self, outcome: int = APPLIED, *, edited: bool = False) -> bool:
        """Accept the step that was waited for; return False, on all ranks, if a value was not finite.

        ``outcome`` is what the optimizer does with the means, and ``edited`` says that they were changed. The next
        exchange tells the other ranks.
        """
        self._check()
        result = self.pipeline.result
        accepted = self.pipeline.commit(outcome, edited=edited)
        if self._run_log is not None:
            self._run_log.after_step(result)
        return accepted

    def discard(self) -> None:
        """Discard the means of the step; the state does not change."""
        result = self.pipeline.result
        self.pipeline.discard()
        if self._run_log is not None:
            self._run_log.discarded(result)

    def skip(self) -> None:
        """Discard the means of the step, which the ranks have agreed to skip."""
        self.pipeline.discard()
        self.pipeline.statistics.skipped_steps += 1
        if self._run_log is not None:
            self._run_log.skipped()

    def allgather_bytes(self, payload: bytes) -> list[bytes]:
        """Return every rank's bytes in rank order. Collective, between steps, blocking."""
        self._check()
        return self._transport.allgather_bytes(payload, self._progress.wait_for)

    def allreduce(self, array: npt.NDArray[np.floating]) -> None:
        """Sum ``array`` over ranks, in place. Collective, between steps, blocking."""
        self._check()
        self._progress.wait_for(self._transport.allreduce(array))

    def prepare(
        self, request: Request, *, apart: bool = True, draw_rank: int | None = None
    ) -> PreparedRequest:
        """Return what this rank needs to run the request, with a state of its own. Nothing is sent.

        With ``apart=False`` it has no memory of its own: it must be alone in its groups, and what it has gathered
        cannot be decoded again. For ``draw_rank`` see :class:`PreparedRequest`. A problem of the request is raised,
        on all ranks, when it is run.
        """
        transport = self._transport
        own = transport.allocator(HOST)
        return PreparedRequest(
            request,
            transport.rank,
            transport.size,
            seed=self._config.seed,
            checksums=self._config.checksums and transport.checksums,
            memory=Memory(own, own) if apart else self._shared.memory(),
            draw_rank=draw_rank,
            preemption=self.pipeline.preemption,
        )

    def begin(self, runs: Sequence[Run]) -> None:
        """Begin a group of requests and return at once; :meth:`finish` waits for it. Collective, between steps.

        All ranks begin the same groups in the same order, between the same two steps. Until :meth:`finish`, inputs
        and outputs belong to the engine's thread, and no step and no other collective may begin.
        """
        self._check()
        if self.is_open:
            raise StateError("a step is open: requests run between steps")
        self._group = RequestGroup(runs, self._transport, self.pipeline.round_complete, self._order)
        self._progress.start(self._group.poll)

    def finish(self) -> list[list[Array]]:
        """Block until the group is done; return every run's arrays. Errors: see :class:`RequestGroup`."""
        group, self._group = self._group, None
        if group is None:
            raise StateError("no group of requests has begun")
        self._progress.finish()
        if group.parted is not None:
            request = group.parted.request.request
            when = f"before the {request.kind} of {request.name}"
            group.verdict = self._progress.parted(self._progress.collectives, group.parted.outcome, when)
        if group.fingerprints is not None:
            group.verdict = self._progress.drifted(group.fingerprints)
        if isinstance(group.verdict, StateError):
            self._progress.end_with(group.verdict)  # all ranks have found it themselves
        return group.results

    def part(self) -> None:
        """End in good order: a rank that ends between backward and ``step()`` votes against the step."""
        if self._progress.work is not None:
            self.abort(f"rank {self._transport.rank} ended while a group of requests was under way")
            return
        if self.owes_vote and self.error is None:
            self.owes_vote = False
            vote = self._transport.allreduce(np.zeros(1, dtype=np.float32))
            self._progress.collectives += 1
            done = self._progress.watchdog.hold(
                lambda: self.error is not None or vote.poll(),
                self._config,
                lambda: f"shutdown: {self._progress.own_rank} waits for all ranks to vote",
            )
            self._aborted |= not done or self.error is not None  # it may never end

    def vote(self, yes: bool) -> bool:
        """Return whether all ranks say yes. Collective, between steps, blocking. Wire: one number."""
        self._check()
        begin = perf_counter()
        votes = np.full(1, yes, dtype=np.float32)
        self.owes_vote = False
        self._progress.wait_for(self._transport.allreduce(votes))
        self.pipeline.statistics.vote_seconds += perf_counter() - begin
        if votes[0] not in range(self._transport.size + 1):
            raise WireFormatError(
                f"{votes[0]} of {self._transport.size} ranks voted for a step, which is impossible"
            )
        return bool(votes[0] == self._transport.size)

    def probe(self, nbytes: int) -> float:
        """Return the median seconds in which every rank sends and receives ``nbytes``. Collective, between steps."""
        self._check()
        return shift(self._transport, nbytes, self._progress.wait_for)

    def leave(self) -> None:
        """Publish that this rank opens no further step, so that ranks that wait for one need not time out."""
        if self.error is None and not self.closed and not self.is_open and self._progress.work is None:
            self._progress.depart()

    def abort(self, message: str) -> None:
        """End the exchange on all ranks: they raise TransportError with this message within seconds."""
        self._aborted = True
        self._progress.publish_abort(message)

    def close(self) -> None:
        """Leave the engine and release the communicator; further calls do nothing."""
        if self.closed:
            return
        self.closed = True
        if self.pipeline.controller is not None:
            self.pipeline.controller.close()
        if self._run_log is not None:
            self._run_log.close()
        if self.recorder is not None:
            self.recorder.close()
        self._progress.end_service()
        if self.error is None and not (
            self._aborted or self.pipeline.is_open or self._progress.work is not None
        ):
            self._transport.close()
        else:
            self._transport.abandon()
            self.pipeline.abandon()

    def _check(self) -> None:
        if (error := self._progress.error) is not None:
            raise error
        if self.closed:
            raise StateError("the exchanger is closed")
        if self._progress.work is not None:
            raise StateError(
                "a group of requests, or another collective between steps, is under way and was not waited for"
            )
        if os.getpid() != self._pid:
            raise StateError("gradcomp does not run in a forked child; initialise it there, or use spawn")
