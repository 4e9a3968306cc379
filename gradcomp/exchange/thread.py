"""The engine's thread drives the steps of every exchanger of a process; long work runs on background threads."""

from __future__ import annotations

import ctypes
import logging
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from time import monotonic, sleep
from typing import Any

from gradcomp.core.config import Config
from gradcomp.core.errors import GradcompError, StateError, TransportError
from gradcomp.exchange.deadlock import Begun, Need
from gradcomp.exchange.fingerprint import Fingerprints
from gradcomp.exchange.members import Roster, StepWatch, place
from gradcomp.exchange.pipeline import Pipeline
from gradcomp.exchange.reports import (
    different_fingerprints,
    different_means,
    different_outcomes,
    different_parameters,
)
from gradcomp.exchange.settings import Settings
from gradcomp.exchange.waiting import Waiting
from gradcomp.exchange.watchdog import Position, Watchdog
from gradcomp.kernels.devices import HOST
from gradcomp.reduce.header import EDITED
from gradcomp.transport.base import Handle

#: The end of the program waits this long for unfinished work, whose results nobody needs any more.
_END_SECONDS = 10.0
#: A wait checks this often whether the engine's thread is alive.
_LIFE_SECONDS = 1.0

Work = Callable[[], Any]

_lock = threading.Lock()
_workers: set[_Worker] = set()
_idle: list[_Worker] = []
logger = logging.getLogger("gradcomp")
SPIN_SECONDS = 50e-6
LONGEST_SLEEP_SECONDS = 250e-6
_IDLE_SECONDS = 0.5
_PR_SET_TIMERSLACK, _SLACK_NANOSECONDS = 29, 1000


class _Worker(threading.Thread):
    """Runs one piece of work after the other; a daemon, so that the end of the program need not wait for it."""

    def __init__(self) -> None:
        super().__init__(name="gradcomp-background", daemon=True)
        self.given: SimpleQueue[tuple[Future[Any], Work] | None] = SimpleQueue()

    def run(self) -> None:
        """Run the given work in order, until None is given."""
        while self._do(self.given.get()):
            pass

    def _do(self, given: tuple[Future[Any], Work] | None) -> bool:
        if given is None:
            return False
        future, work = given
        result, error = None, None
        try:
            result = work()
        except BaseException as raised:  # noqa: BLE001  (the future raises it)
            error = raised
        # The worker is idle before its result is set, since whoever waits for that may give the next work at once.
        with _lock:
            if self in _workers:
                _idle.append(self)
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)
        return True


def in_background(work: Work) -> Future[Any]:
    """Start ``work`` concurrently with all work that was started before, and return its future."""
    future: Future[Any] = Future()
    with _lock:
        worker = _idle.pop() if _idle else _Worker()
        if worker not in _workers:
            _workers.add(worker)
            worker.start()
    worker.given.put((future, work))
    return future


def finish_background() -> None:
    """Wait for unfinished work, but only for seconds.

    A thread that returns from compiled code after the interpreter has ended takes the process down with SIGABRT.
    """
    with _lock:
        workers = list(_workers)
        _workers.clear()
        _idle.clear()
    for worker in workers:
        worker.given.put(None)
    deadline = monotonic() + _END_SECONDS
    for worker in workers:
        worker.join(max(0.0, deadline - monotonic()))


def sleep_precisely() -> None:
    """Set this thread's timer slack to 1 microsecond; by default Linux may add 50 to each sleep."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(_SLACK_NANOSECONDS))


class Engine:
    """Polls the exchangers' pipelines, and never blocks inside a collective.

    While a collective is under way it spins for 50 microseconds, then sleeps up to 250. While no bucket is complete
    it sleeps until a layer completes one. Only the :class:`Watchdog` reads the control channel; its verdicts wake
    the engine.

    Whatever is raised on the thread, by a log handler as well, ends the exchanger that it was raised for.
    """

    def __init__(self) -> None:
        self._exchangers: tuple[Progress, ...] = ()
        self._wake = threading.Event()
        self._lock = threading.Lock()
        self._stopping = False
        self._thread: threading.Thread | None = None

    def add(self, exchanger: Progress) -> None:
        """Serve an exchanger; the first one starts the thread."""
        with self._lock:
            if self._stopping:
                raise StateError("the engine has been stopped")
            self._exchangers = (*self._exchangers, exchanger)
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name="gradcomp", daemon=True)
                self._thread.start()

    def remove(self, exchanger: Progress) -> None:
        with self._lock:
            self._exchangers = tuple(e for e in self._exchangers if e is not exchanger)

    def wake(self) -> None:
        """Make the thread look at once, since something changed."""
        self._wake.set()

    @property
    def alive(self) -> bool:
        """Return whether the thread runs. If it does not, no wait would end."""
        thread = self._thread
        return thread is not None and thread.is_alive()

    def stop(self) -> None:
        """End the thread; further calls do nothing."""
        with self._lock:
            self._stopping = True
            thread, self._thread = self._thread, None
        self._wake.set()
        if thread is not None:
            thread.join()

    def _loop(self) -> None:
        try:
            self._serve()
        except BaseException as error:  # noqa: BLE001 - nothing else would end the waits
            for exchanger in self._exchangers:
                exchanger.crash(error)

    def _serve(self) -> None:
        sleep_precisely()
        progress_at = monotonic()
        pause = 0.0
        device = HOST
        while not self._stopping:
            self._wake.clear()
            waiting, advanced = set(), False
            for exchanger in self._exchangers:
                before = exchanger.pipeline.advances
                try:
                    if exchanger.device is not device:
                        device = exchanger.device
                        device.make_current()
                    waiting.add(exchanger.poll())
                except BaseException as error:  # noqa: BLE001 - it ends this exchanger, not the others
                    exchanger.crash(error)
                advanced |= exchanger.pipeline.advances != before
            now = monotonic()
            if advanced:
                progress_at, pause = now, SPIN_SECONDS / 2
            if not waiting & {Waiting.WIRE, Waiting.DEVICE, Waiting.BACKGROUND}:
                self._wake.wait(_IDLE_SECONDS)
                continue
            if now - progress_at > SPIN_SECONDS:
                pause = min(2 * pause, LONGEST_SLEEP_SECONDS)
                sleep(pause)
            else:
                sleep(0)


class Progress(StepWatch):
    """Drives a step, or collectives between steps, until it is done or fails; one at a time.

    ``is_open`` says that a step has begun that no thread has waited for.
    ``collectives`` counts those that began since the last step. ``error`` says why there will be no further step.
    From :meth:`begin` until the wait ends the engine's thread alone touches the pipeline and the communicator. Only
    submissions and the flush of an open step come from the training thread.
    """

    def __init__(
        self, engine: Engine, watchdog: Watchdog, config: Config, pipeline: Pipeline, settings: Settings
    ) -> None:
        transport = pipeline.transport
        roster = settings.roster or Roster.of_size(transport.size)
        super().__init__(watchdog, config, f"exchanger/{settings.name}", transport.rank, roster)
        self.is_open = False
        self.collectives = 0
        self.error: GradcompError | None = None
        self._engine = engine
        self.pipeline = pipeline
        self.device = pipeline.device
        self._transport = transport
        self._listener = settings.listener
        self._advice = settings.advice
        #: The work that was started between steps and that no thread has waited for.
        self.work: Callable[[], Waiting] | None = None
        self._begun = 0
        self._done = threading.Event()
        self._seen_advances = 0
        engine.add(self)
        watchdog.add(self)

    def end_service(self) -> None:
        self._engine.remove(self)
        self.watchdog.remove(self)

    # -- the training thread ------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Make the next wait last until the engine's thread is done with what begins now."""
        self._begun += 1
        self.watchdog.callers.came()
        self._done.clear()
        if self.error is not None:  # it came in between, and will not be set again
            self._done.set()

    def wait(self) -> None:
        """Wait until the engine's thread says that it is done, or has ended."""
        self.watchdog.callers.begin(self)
        try:
            while not self._done.wait(_LIFE_SECONDS):
                if not self._engine.alive and not self._done.is_set():
                    self.stop_with(
                        StateError("the engine's thread has ended: gradcomp was shut down meanwhile")
                    )
        finally:
            self.watchdog.callers.end()

    def wait_for(self, handle: Handle) -> None:
        """Wait for a collective between steps; the engine polls it as it does a step."""
        self.start(lambda: Waiting.NOTHING if handle.poll() else Waiting.WIRE)
        self.finish()

    def start(self, work: Callable[[], Waiting]) -> None:
        """Begin something between steps; the engine polls it as it does a step."""
        self.collectives += 1
        self.begin()
        self.work = work
        self._engine.wake()

    def finish(self) -> None:
        """Wait for what :meth:`start` began; raise the error if there is one."""
        self.wait()
        self.work = None
        if self.error is not None:
            raise self.error

    # -- the watchdog's thread, too -----------------------------------------------------------------------------

    @property
    def position(self) -> Position:
        return self.pipeline.position if self.is_open else (self.pipeline.step, -1, self.collectives)

    @property
    def where(self) -> str:
        """Return the position in words, with the names of layers."""
        position = self.position
        buckets = self.pipeline.layout.buckets
        if not 0 <= position[1] < len(buckets):
            return place(position)
        layers = buckets[position[1]].layers
        names = [self.pipeline.layers[layer].name for layer in layers[:3].tolist()]
        more = ", ..." if len(layers) > 3 else ""
        return f"{place(position)} ({', '.join(names)}{more})"

    @property
    def begun(self) -> Begun:
        """Return the number of steps and collectives begun; an open step counts once all its gradients have arrived."""
        return Begun(self._begun - (self.is_open and not self.pipeline.arrivals.complete))

    def need(self, what: object) -> Need | None:
        if what is not self:
            return None
        where = (
            self.where if self.is_open else f"a collective of an optimizer after step {self.pipeline.step}"
        )
        return Need(self.scope, self.roster.ranks, self._begun, where=where)

    @property
    def advances(self) -> int:
        return self.pipeline.advances

    def heard(self) -> None:
        """Wake the engine's thread, which stops what is under way."""
        self._engine.wake()

    # -- the engine's thread ------------------------------------------------------------------------------------

    def poll(self) -> Waiting:
        if self.error is not None:
            return Waiting.NOTHING
        if self.verdict is not None:
            self._heed(self.verdict)
            return Waiting.NOTHING
        work = self.work
        if self._done.is_set() or (not self.is_open and work is None):
            return Waiting.NOTHING
        # The arrays of what is under way stay until ``_done`` is set, whether the training thread waits already or not.
        pipeline = self.pipeline
        try:
            if work is not None:
                waiting = work()
            elif pipeline.awaited is None or pipeline.awaited.poll():
                waiting = pipeline.poll()
            else:
                waiting = Waiting.WIRE
        except GradcompError as error:
            pipeline.let_go()
            self._fail(error)
            return Waiting.NOTHING
        if waiting is not Waiting.WIRE:
            self.since = None
        elif self.since is None or pipeline.advances != self._seen_advances:
            self._seen_advances = pipeline.advances
            self.since = monotonic()
        if waiting is Waiting.NOTHING:
            if work is None and (divergence := self._divergence()) is not None:
                # All ranks have found it in the same step, so none has to be told.
                self.end_with(divergence)
            self._done.set()
        return waiting

    def _heed(self, verdict: BaseException) -> None:
        """Stop, since the watchdog has ended this wait, or the next one."""
        if not isinstance(verdict, GradcompError):
            raise verdict
        if not self.told:
            self._publish(verdict)
        self.stop_with(verdict)

    def crash(self, error: BaseException) -> None:
        """Stop here and on all ranks after an unforeseen exception on the engine's thread. Raises nothing."""
        problem = StateError(f"the engine's thread failed: {type(error).__name__}")
        with suppress(BaseException):  # its text may be what raises
            problem = StateError(
                f"the engine's thread failed at {self.where}: {type(error).__name__}: {error}"
            )
        problem.__cause__ = error
        with suppress(BaseException):
            self.publish_abort(f"{self.own_rank}: {problem}")
        with suppress(BaseException):
            self.pipeline.let_go()
        with suppress(BaseException):
            self.stop_with(problem)

    def _fail(self, error: GradcompError) -> None:
        """Find out why something broke here, tell every rank, and raise in the training thread."""
        if isinstance(error, TransportError):
            error = TransportError(f"{self.where}: {error}; {self.culprits()}")
        self._publish(error)
        self.stop_with(error)

    def _publish(self, error: GradcompError) -> None:
        self.publish_abort(f"{self.own_rank}: {type(error).__name__}: {error}")

    def _divergence(self) -> StateError | None:
        """Return the error of a finished step in which ranks diverged, the same on all ranks, or None."""
        result = self.pipeline.result
        assert result is not None, "a step that is done has a result"
        if result.parted:
            return self.parted(result.step, self.pipeline.outcome, f"after step {result.step}")
        ranks = self.roster.ranks
        if result.notices & EDITED:
            return different_means(self, result.step, self.pipeline.notices)
        table, self.pipeline.digest_table = self.pipeline.digest_table, None
        fingerprints = self.pipeline.fingerprints
        if table is None and fingerprints is None:
            return None
        names = [layer.name for layer in self.pipeline.layers]
        if fingerprints is not None:
            return different_fingerprints(fingerprints, names, ranks, f"after step {result.step}")
        return None if table is None else different_parameters(table, names, ranks, result.step)

    def parted(self, number: int, outcome: int, when: str) -> StateError:
        """Return the error for ranks with different outcomes; the exchange's ``number`` is equal on all ranks."""
        return StateError(f"{different_outcomes(self, number, outcome, when)}{self._advice}")

    def drifted(self, found: Fingerprints) -> StateError:
        """Return the error for fingerprints that differ between steps."""
        return different_fingerprints(found, [], self.roster.ranks, f"in collective {self.collectives}")

    def stop_with(self, error: GradcompError) -> None:
        """Give up what is under way and the communicator; every later call raises ``error``."""
        try:
            self._transport.abandon()
            self.pipeline.abandon()  # who hears of the error may take its gradients back
        finally:
            try:
                self.end_with(error)
            finally:
                self._done.set()

    def end_with(self, error: GradcompError) -> None:
        """Make every later call raise ``error``; the communicator remains usable."""
        self.error, self.since = error, None
        if self._listener is not None:
            self._listener.failed(error)
