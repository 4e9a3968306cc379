"""Work that takes long, on a thread of its own: never on the engine's, and never on the training thread."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from time import monotonic
from typing import Any

#: How long the end of the program waits for work that nobody needs any more.
_END_SECONDS = 10.0

_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def in_background(work: Callable[[], Any]) -> Future[Any]:
    """Start ``work``; a daemon, so that the end of the program does not wait for ever."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001  (whoever asks for the result gets it)
            future.set_exception(error)

    thread = threading.Thread(target=run, name="gradcomp-background", daemon=True)
    _threads.add(thread)
    thread.start()
    return future


def finish_background() -> None:
    """Wait for what is under way, for seconds at most.

    A thread that comes back from compiled code after the interpreter has ended takes the process down with SIGABRT.
    """
    deadline = monotonic() + _END_SECONDS
    for thread in list(_threads):
        thread.join(max(0.0, deadline - monotonic()))
