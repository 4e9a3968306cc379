"""Work that takes long, on a thread of its own: never on the engine's, and never on the training thread.

Threads are kept and used again. The C library gives a thread that begins memory of its own, which the process keeps: a
thread for every piece of work made long runs grow by 0.14 MB now and then.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from time import monotonic
from typing import Any

#: How long the end of the program waits for work that nobody needs any more.
_END_SECONDS = 10.0

Work = Callable[[], Any]


class _Worker(threading.Thread):
    """Does one piece of work after the other; a daemon, so that the end of the program does not wait for ever."""

    def __init__(self) -> None:
        super().__init__(name="gradcomp-background", daemon=True)
        self.given: SimpleQueue[tuple[Future[Any], Work] | None] = SimpleQueue()

    def run(self) -> None:
        """Until None is given."""
        while self._do(self.given.get()):
            pass

    def _do(self, given: tuple[Future[Any], Work] | None) -> bool:
        if given is None:
            return False
        future, work = given
        result, error = None, None
        try:
            result = work()
        except BaseException as raised:  # noqa: BLE001  (whoever asks for the result gets it)
            error = raised
        # Idle first: who hears of the result may give the next work at once.
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
    """Start ``work``, beside all that has been started before."""
    future: Future[Any] = Future()
    with _lock:
        worker = _idle.pop() if _idle else _Worker()
        if worker not in _workers:
            _workers.add(worker)
            worker.start()
    worker.given.put((future, work))
    return future


def finish_background() -> None:
    """Wait for what is under way, for seconds at most.

    A thread that comes back from compiled code after the interpreter has ended takes the process down with SIGABRT.
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
