"""Work that takes long, on a thread of its own: never on the engine's, and never on the training thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


def in_background(work: Callable[[], Any]) -> Future[Any]:
    """Start ``work``; a daemon, so that the end of the program does not wait for it."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001  (whoever asks for the result gets it)
            future.set_exception(error)

    threading.Thread(target=run, name="gradcomp-control", daemon=True).start()
    return future
