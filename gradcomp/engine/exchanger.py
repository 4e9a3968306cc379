"""One wrapped optimizer's side of the engine: layers, plan, state, step counter, its own communicator."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from gradcomp.compress import Compressor
from gradcomp.compress.policy import Schedule
from gradcomp.control import Controller, ControllerRun, Environment
from gradcomp.core.config import Config
from gradcomp.core.errors import ConfigError, GradcompError, StateError, TransportError, WireFormatError
from gradcomp.core.journal import Journal
from gradcomp.core.layers import LayerSpec
from gradcomp.core.plan import Plan
from gradcomp.core.scheme import AUTO, parse
from gradcomp.core.topology import Topology
from gradcomp.engine.agreement import agree, agree_on_slices, describe
from gradcomp.engine.background import in_background
from gradcomp.engine.cues import DONE, STEP, Cues
from gradcomp.engine.divergence import comparison_is_due, different_outcomes, different_parameters
from gradcomp.engine.engine import Engine
from gradcomp.engine.keys import Position
from gradcomp.engine.links import measure, shift
from gradcomp.engine.plan_log import PlanLog
from gradcomp.engine.watch import Roster, StepWatch, place
from gradcomp.engine.watchdog import Watchdog
from gradcomp.kernels.devices import HOST, Device
from gradcomp.pipeline import Bucket, Number, Pipeline, StepResult, Waiting
from gradcomp.pipeline.digests import Digests
from gradcomp.pipeline.memory import Allocate
from gradcomp.reduce.header import APPLIED
from gradcomp.transport.base import Handle, Transport

logger = logging.getLogger("gradcomp")

#: A wait looks so often whether the engine's thread still lives.
_LIFE_SECONDS = 1.0

#: Name of the job's first exchanger among all ranks.
FIRST = "all-0"


class Listener(Protocol):
    """Who wants to hear of means before the step ends. Called on the engine's thread; must not block."""

    def bucket_complete(self, bucket: Bucket) -> None:
        """The means of the bucket's layers and slices are in their outputs."""
        ...

    def failed(self, error: GradcompError) -> None:
        """No further mean will come, in this step or later."""
        ...


@dataclass(frozen=True)
class Controlled:
    """A controller with what it may change: ``compressors[i]`` of layer i, or None, from step ``first_step`` on."""

    controller: Controller
    compressors: Sequence[Compressor | None]
    first_step: int = 0


class Exchanger:
    """Exchanges the gradients of a fixed list of layers, step after step.

    Construction is collective: the ranks compare layers, plan, settings and ``arguments``, those of the frontend, first
    (PlanMismatchError on every rank if they differ). The training thread opens a step, submits layers, flushes and
    waits; the engine's thread does the rest. After a failure every call raises the same TransportError. ``advice``:
    ends the error where some ranks applied the means of a step and others did not.
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
        *,
        name: str = FIRST,
        average: bool = True,
        listener: Listener | None = None,
        order_step: int = 0,
        schedule: Schedule | None = None,
        topology: Topology | None = None,
        arguments: Mapping[str, Any] | None = None,
        controlled: Controlled | None = None,
        compression: str = "",
        device: Device = HOST,
        digests: Callable[[], Future[Digests]] | None = None,
        roster: Roster | None = None,
        advice: str = "",
    ) -> None:
        wait_for = watchdog.patient(config, "the other ranks to compare layers and settings")
        topology = topology or Topology.one_host(transport.size)
        shared = {
            "average": average,
            "order_step": order_step,
            "hosts": list(topology.hosts),
            **(arguments or {}),
        }
        if controlled is not None:
            shared["controller"] = controlled.controller.to_string()
        journal = _open_journal(transport, config, name)
        try:
            agree(transport, describe(layers, plan, config, **shared), wait_for=wait_for)
            config = agree_on_slices(transport, config, device.driver is not None, wait_for=wait_for)
            if config.deterministic:
                _refuse_times(controlled, config, topology)
            running = _begin_controller(controlled, layers, transport, topology, config, device)
        except GradcompError:
            if journal is not None:
                journal.close()
            raise
        between_hosts = config.reduction == AUTO and len(topology.leaders) > 1
        self._pipeline = Pipeline(
            layers,
            plan,
            transport,
            config,
            allocate,
            average=average,
            on_complete=None if listener is None else listener.bucket_complete,
            order_step=order_step,
            schedule=schedule,
            topology=topology,
            network=measure(transport, topology, wait_for) if between_hosts else None,
            controller=running,
            device=device,
        )
        self._listener = listener
        self._engine = engine
        self._config = config
        self._transport = transport
        self._watch = StepWatch(
            watchdog,
            config,
            f"exchanger/{name}",
            transport.rank,
            roster or Roster.of_size(transport.size),
            lambda: self._position,
            self._where,
            lambda: self._pipeline.advances,
            engine.wake,
        )
        self._digests = digests
        self._advice = advice
        #: Whether the others may wait for a vote about the exchange that was waited for.
        self.owes_vote = False
        self._exchanges = 0  # begun so far; the same on all ranks, whatever became of their steps
        #: Called before each exchange but the first with the number of those before it; may use collectives.
        self.before_exchange: Callable[[int], None] | None = None
        self._done = threading.Event()
        self._opened = False
        self._aside: Handle | None = None  # a collective between steps
        self._asides = 0
        self._cues: Cues | None = None
        if self._pipeline.servers:
            self._cues = Cues(transport, self._pipeline.servers)
        self._cue: Handle | None = None  # a trainer's, of the step that is open
        self._last_cue = 0  # given by a trainer, heard by a server
        self._cued = False  # to a step that has not been opened
        self._error: GradcompError | None = None
        self._closed = False
        self._aborted = False  # by this rank: the others may be left in a collective
        self._seen_advances = 0
        self._pid = os.getpid()
        self._plan_log: PlanLog | None = None
        if transport.rank == 0 and (running is not None or journal is not None):
            controller = "none" if controlled is None else controlled.controller.to_string()
            self._plan_log = PlanLog(self._pipeline, journal, controller, compression)
        engine.add(self)
        watchdog.add(self._watch)

    # -- the training thread ------------------------------------------------------------------------------------

    @property
    def pipeline(self) -> Pipeline:
        """The pipeline; between steps the training thread may read and change it."""
        return self._pipeline

    @property
    def device(self) -> Device:
        """Where the gradients are."""
        return self._pipeline.device

    @property
    def is_open(self) -> bool:
        """Whether a step has begun that nobody has waited for."""
        return self._opened

    @property
    def error(self) -> GradcompError | None:
        """Why the exchanger is unusable, if it is."""
        return self._error

    def open(self, scale: Number = 1.0, learning_rate: Number = 0.0) -> None:
        """Begin an exchange; see :meth:`Pipeline.open`. A server does when it has been told to, by :meth:`listen`."""
        self._check()
        if self._pipeline.serves and not self._cued:
            raise StateError("this rank only serves: it calls opt.serve(), and has no gradients of its own")
        if self._cues is not None and not self._pipeline.serves:
            self._last_cue = STEP  # first of all: servers take part in what follows
            self._cue = self._cues.give(STEP, self._pipeline.step)
        controller = self._pipeline.controller
        if controller is not None and controller.wants_network:
            controller.hear(measure(self._transport, controller.environment.topology, self._wait_for))
        if self._exchanges and self.before_exchange is not None:
            self.before_exchange(self._exchanges)
        due = comparison_is_due(self._config, self._exchanges)
        self._pipeline.open(scale, learning_rate, self._digests() if self._digests and due else None)
        self._exchanges += 1
        self._asides = 0
        self._cued = False
        self._begin()
        self._opened = True

    def submit(
        self,
        layer: int,
        gradient: int,
        output: int,
        keep: object = None,
        event: object = None,
        *,
        zero_is_absent: bool = False,
    ) -> None:
        """A gradient is ready; see :meth:`GradientRegistry.submit`. Callable from any one thread at a time."""
        if self._pipeline.registry.submit(
            layer, gradient, output, keep, event, zero_is_absent=zero_is_absent
        ):
            self._engine.wake()

    def submit_absent(self, layer: int, *, sparse: bool = False, output: int = 0) -> None:
        """A layer has no dense gradient in this step; the mean, if another rank has one, goes to ``output``."""
        if self._pipeline.registry.submit_absent(layer, sparse=sparse, output=output):
            self._engine.wake()

    def flush(self) -> None:
        """No more layers will come in this step."""
        self._pipeline.registry.flush()
        self._engine.wake()

    def wait(self) -> StepResult:
        """Block until the step is done; the means are then in the outputs."""
        begin = perf_counter()
        self._await()
        self._pipeline.statistics.exposed_seconds += perf_counter() - begin
        self._opened = False
        self._check()
        result = self._pipeline.result
        assert result is not None, "a step that is done has a result"
        return result

    def commit(self, outcome: int = APPLIED) -> bool:
        """Accept the step that was waited for; False, on all ranks alike, if a value was not finite.

        ``outcome``: what the optimizer does with the means. The other ranks hear of it in the next exchange.
        """
        self._check()
        accepted = self._pipeline.commit(outcome)
        if self._plan_log is not None:
            self._plan_log.after_step()
        return accepted

    def discard(self) -> None:
        """Forget the step that was waited for."""
        self._pipeline.discard()

    def allgather_bytes(self, payload: bytes) -> list[bytes]:
        """Collective, between steps, blocking: every rank's bytes in rank order."""
        self._check()
        return self._transport.allgather_bytes(payload, self._wait_for)

    def allreduce(self, array: npt.NDArray[np.floating]) -> None:
        """Collective, between steps, blocking: sum ``array`` over ranks, in place."""
        self._check()
        self._wait_for(self._transport.allreduce(array))

    def _wait_for(self, handle: Handle) -> None:
        """Wait for a collective between steps; the engine polls and watches it as it does a step."""
        self._asides += 1
        self._begin()
        self._aside = handle
        self._engine.wake()
        self._await()
        self._aside = None
        self._check()

    def _await(self) -> None:
        """Until the engine's thread says that it is done, or is no more."""
        while not self._done.wait(_LIFE_SECONDS):
            if not self._engine.alive and not self._done.is_set():
                self._stop_with(StateError("the engine's thread has ended: gradcomp was shut down meanwhile"))

    def _begin(self) -> None:
        self._done.clear()
        if self._error is not None:  # it came in between: nobody would set this again
            self._done.set()

    def listen(self) -> bool:
        """On a server, between steps, blocking: whether the trainers begin a step, or are done for now."""
        self._check()
        assert self._cues is not None, "only servers listen"
        self._wait_for(self._cues.listen())
        self._last_cue = self._cues.heard(self._pipeline.step)
        self._cued = self._last_cue == STEP
        return self._cued

    def dismiss(self) -> None:
        """On a trainer, between steps, blocking: tell the servers that there is no further step for now."""
        self._check()
        if self._pipeline.serves:
            raise StateError("this rank only serves: those who train say when they are done")
        if self._cues is not None:
            self._last_cue = DONE
            self._wait_for(self._cues.give(DONE, self._pipeline.step))

    def part(self) -> None:
        """The program ends in good order: trainers dismiss the servers, and servers listen, until the deadline.

        A rank that ends between backward and ``step()`` votes against the step.
        """
        if self.owes_vote and self._error is None:
            self.owes_vote = False
            self._leave_with(self._transport.allreduce(np.zeros(1, dtype=np.float32)), "all ranks to vote")
        if self._cues is None or self._last_cue == DONE or self._opened or self._error is not None:
            return
        serves, step = self._pipeline.serves, self._pipeline.step
        self._asides += 1
        try:
            handle = self._cues.listen() if serves else self._cues.give(DONE, step)
            whom = "the ranks that train to end" if serves else "the ranks that serve to hear of the end"
            if not self._leave_with(handle, whom):
                return
            if serves and self._cues.heard(step) == STEP:
                self.abort(f"rank {self._transport.rank} only serves, and ended without opt.serve()")
        except GradcompError as error:
            logger.debug("parting: %s", error)

    def vote(self, yes: bool) -> bool:
        """Collective, between steps, blocking: whether all ranks say yes. Wire: one number."""
        self._check()
        begin = perf_counter()
        votes = np.full(1, yes, dtype=np.float32)
        self.owes_vote = False
        self._wait_for(self._transport.allreduce(votes))
        self._pipeline.statistics.vote_seconds += perf_counter() - begin
        if votes[0] not in range(self._transport.size + 1):
            raise WireFormatError(f"{votes[0]} of {self._transport.size} ranks voted for a step")
        return bool(votes[0] == self._transport.size)

    def _leave_with(self, handle: Handle, whom: str) -> bool:
        """Whether a collective of the program's end came to its own before the deadline."""
        done = self._watch.watchdog.hold(
            lambda: self._error is not None or handle.poll(),
            self._config,
            lambda: f"shutdown: {self._watch.own_rank} waits for {whom}",
        )
        self._aborted |= not done or self._error is not None  # it may never end
        return not self._aborted

    def probe(self, nbytes: int) -> float:
        """Collective, between steps: median seconds in which every rank sends and receives ``nbytes``."""
        self._check()
        return shift(self._transport, nbytes, self._wait_for)

    def leave(self) -> None:
        """Say that this rank opens no further step: those that wait for it in one need not wait for the deadline."""
        if self._error is None and not self._closed and not self._opened:
            self._watch.leave()

    def abort(self, message: str) -> None:
        """End the exchange on all ranks: they raise TransportError with this message within seconds."""
        self._aborted = True
        self._watch.publish_abort(message)

    def close(self) -> None:
        """Leave the engine and release the communicator. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._plan_log is not None:
            self._plan_log.close()
        self._engine.remove(self)
        self._watch.watchdog.remove(self._watch)
        if self._error is None and not self._aborted and not self._pipeline.is_open:
            self._transport.close()
        else:
            self._transport.abandon()
            self._pipeline.abandon()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
        if self._closed:
            raise StateError("the exchanger is closed")
        if os.getpid() != self._pid:
            raise StateError("gradcomp does not run in a forked child; initialise it there, or use spawn")

    # -- the engine's thread ------------------------------------------------------------------------------------

    @property
    def _position(self) -> Position:
        return self._pipeline.position if self._opened else (self._pipeline.step, -1, self._asides)

    @property
    def advances(self) -> int:
        """Rounds completed so far."""
        return self._pipeline.advances

    def poll(self) -> Waiting:
        """Do what can be done without blocking."""
        if self._error is not None:
            return Waiting.NOTHING
        if self._watch.verdict is not None:
            self._heed(self._watch.verdict)
            return Waiting.NOTHING
        if self._done.is_set():
            return Waiting.NOTHING
        # From here on the training thread waits, or is about to: what it handed in stays until we say "done".
        aside = self._aside
        if not self._opened and aside is None:
            return Waiting.NOTHING
        try:
            waiting = self._pipeline.poll() if aside is None else _poll(aside)
            if waiting is Waiting.NOTHING and self._cue is not None:
                waiting = _poll(self._cue)
        except GradcompError as error:
            self._fail(error)
            return Waiting.NOTHING
        if waiting is Waiting.NOTHING:
            self._cue = None
            if aside is None and (divergence := self._divergence()) is not None:
                # All ranks have found it in the same step: nobody is to be told.
                self._end_with(divergence)
            self._done.set()
        if waiting is not Waiting.WIRE:
            self._watch.since = None
        elif self._watch.since is None or self._pipeline.advances != self._seen_advances:
            self._seen_advances = self._pipeline.advances
            self._watch.since = monotonic()
        return waiting

    def _heed(self, verdict: BaseException) -> None:
        """The watchdog has ended the wait, or the next one."""
        if not isinstance(verdict, GradcompError):
            raise verdict
        if not self._watch.told:
            self._publish(verdict)
        self._stop_with(verdict)

    def crash(self, error: BaseException) -> None:
        """What should never be raised on the engine's thread was: stop here and on all ranks. Raises nothing."""
        problem = StateError(f"the engine's thread failed: {type(error).__name__}")
        with suppress(BaseException):  # its text may be what raises
            problem = StateError(
                f"the engine's thread failed at {self._where()}: {type(error).__name__}: {error}"
            )
        problem.__cause__ = error
        with suppress(BaseException):
            self._watch.publish_abort(f"{self._watch.own_rank}: {problem}")
        with suppress(BaseException):
            self._stop_with(problem)

    def _fail(self, error: GradcompError) -> None:
        """Something broke here: find out why, tell everyone, raise in the training thread."""
        if isinstance(error, TransportError):
            error = TransportError(f"{self._where()}: {error}; {self._watch.culprits()}")
        self._publish(error)
        self._stop_with(error)

    def _publish(self, error: GradcompError) -> None:
        self._watch.publish_abort(f"{self._watch.own_rank}: {type(error).__name__}: {error}")

    def _where(self) -> str:
        bucket = self._position[1]
        buckets = self._pipeline.layout.buckets
        if not 0 <= bucket < len(buckets):
            return place(self._position)
        names = [self._pipeline.layers[layer].name for layer in buckets[bucket].layers[:3].tolist()]
        more = ", ..." if len(buckets[bucket].layers) > 3 else ""
        return f"{place(self._position)} ({', '.join(names)}{more})"

    def _divergence(self) -> StateError | None:
        """What has become known in the step that is done, on all ranks alike."""
        result = self._pipeline.result
        assert result is not None, "a step that is done has a result"
        if result.parted:
            rank, size = self._transport.rank, self._transport.size
            outcome = self._pipeline.outcome
            control = self._watch.watchdog.control
            error = different_outcomes(control, self._watch.scope, rank, size, result.step, outcome)
            return StateError(f"{error}{self._advice}")
        table, self._pipeline.digest_table = self._pipeline.digest_table, None
        if table is None:
            return None
        return different_parameters(table, [layer.name for layer in self._pipeline.layers], result.step)

    def _stop_with(self, error: GradcompError) -> None:
        try:
            self._transport.abandon()
            self._pipeline.abandon()  # those who are told may take their gradients back
        finally:
            try:
                self._end_with(error)
            finally:
                self._done.set()

    def _end_with(self, error: GradcompError) -> None:
        self._error = error
        self._watch.since = None
        if self._listener is not None:
            self._listener.failed(error)


def _refuse_times(controlled: Controlled | None, config: Config, topology: Topology) -> None:
    """ConfigError for what decides by measured times: no two runs have these in common."""
    what = ""
    if config.reduction == AUTO and len(topology.leaders) > 1:
        what = "between hosts reduction=auto chooses by measured times: name a reduction"
    if controlled is not None and controlled.controller.by_times:
        what = f"{controlled.controller.to_string()} decides by measured times: choose another controller or objective"
    if what:
        raise ConfigError(f"deterministic=True: {what}, or leave deterministic off")


def _begin_controller(
    controlled: Controlled | None,
    layers: Sequence[LayerSpec],
    transport: Transport,
    topology: Topology,
    config: Config,
    device: Device,
) -> ControllerRun | None:
    """The controller's, if there is one."""
    if controlled is None:
        return None
    return controlled.controller.begin(
        Environment(
            layers,
            controlled.compressors,
            transport.rank,
            topology,
            parse(config.reduction),
            config.seed,
            controlled.first_step,
            lambda work: in_background(device.bound(work)),
            config.slice_elements,
            device.zeros,
            config.deterministic,
        )
    )


def _open_journal(transport: Transport, config: Config, name: str) -> Journal | None:
    """Rank 0's, if there is to be one; if it cannot be opened, all ranks raise."""
    if transport.rank != 0 or not config.run_log:
        return None
    try:
        return Journal(_log_path(config.run_log, name))
    except ConfigError as error:
        agree(transport, None, error)
        raise


def _log_path(path: str, name: str) -> Path:
    """The run log of the job's first exchanger is at ``path``; others put their names into theirs."""
    whole = Path(path)
    return whole if name == FIRST else whole.with_name(f"{whole.stem}.{name}{whole.suffix}")


def _poll(handle: Handle) -> Waiting:
    return Waiting.NOTHING if handle.poll() else Waiting.WIRE
