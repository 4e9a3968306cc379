"""Long work runs on threads of its own, never on the engine's thread nor on the training thread.

Threads are kept and reused. The C library gives every new thread memory that the process keeps, so that a thread
for each piece of work made long runs grow by 0.14 MB now and then.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from time import monotonic
from typing import Any

#: The end of the program waits this long for unfinished work, whose results nobody needs any more.
_END_SECONDS = 10.0

Work = Callable[[], Any]


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


_lock = threading.Lock()
_workers: set[_Worker] = set()
_idle: list[_Worker] = []


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
