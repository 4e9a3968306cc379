"""Ranks that are threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

#: A blocking all-gather of bytes.
Meet = Callable[[bytes], list[bytes]]


def on_each(size: int, work: Callable[[int], Any]) -> list[Any]:
    """What every rank returns or raises."""
    found: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            found[rank] = work(rank)
        except BaseException as error:  # noqa: BLE001 - looked at by the test
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


def meets(size: int) -> list[Meet]:
    """One ``meet`` per rank."""
    barrier = threading.Barrier(size)
    replies: list[bytes] = [b""] * size

    def of(rank: int) -> Meet:
        def meet(message: bytes) -> list[bytes]:
            barrier.wait(30)
            replies[rank] = message
            barrier.wait(30)
            return list(replies)

        return meet

    return [of(rank) for rank in range(size)]
