"""The engine's thread serves every exchanger of a process; long work runs on background threads."""

from __future__ import annotations

import ctypes
import logging
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

from gradcomp.core.errors import StateError
from gradcomp.exchange.waiting import Waiting
from gradcomp.kernels.devices import HOST

if TYPE_CHECKING:
    from gradcomp.exchange.exchanger import Progress


#: The end of the program waits this long for unfinished work, whose results nobody needs any more.
_END_SECONDS = 10.0

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
        """Run what is given until None is."""
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
    """Start ``work`` beside all that has been started before; return its future."""
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
    """Let this thread's sleeps end when they should: by default Linux may add 50 microseconds to each."""
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
        """Return whether the thread runs: without it nobody ends a wait."""
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
