"""Ranks in shared memory, for tests: all in one process, or as processes that meet through files."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from threads import meets, on_each

_native = pytest.importorskip("gradcomp._native")

from gradcomp.transport.shm import ShmTransport  # noqa: E402 - which needs it


@contextlib.contextmanager
def native_ranks(size: int, ring_bytes: int = 4096) -> Iterator[list[_native.ShmRank]]:
    """Started ranks without a transport around them."""
    first = _native.ShmRank.create(size, ring_bytes)
    others = [_native.ShmRank.attach(first.location(), r, size, ring_bytes) for r in range(1, size)]
    ranks = [first, *others]
    try:
        for rank in ranks:
            rank.start([_native.shm_process()] * size)
        yield ranks
    finally:
        for rank in ranks:
            rank.close()


@contextlib.contextmanager
def shm_transports(size: int, ring_bytes: int | None = 4096) -> Iterator[list[ShmTransport]]:
    """One transport per rank. One thread may use them all: calls do not block."""
    made = join_all(size, lambda rank, meet: ShmTransport(rank, size, meet, ring_bytes))
    for one in made:
        if isinstance(one, Exception):
            raise one
    try:
        yield made
    finally:
        for one in made:
            one.close()


def join_all(size: int, join: Callable[[int, Any], Any]) -> list[Any]:
    """What ``join(rank, meet)`` returns or raises on each rank; one thread a rank."""
    of_ranks = meets(size)
    return on_each(size, lambda rank: join(rank, of_ranks[rank]))


def settle(handles: Sequence[Any], seconds: float = 20.0) -> None:
    """Poll all until all are complete."""
    deadline = time.monotonic() + seconds
    waiting = list(handles)
    while waiting:
        waiting = [handle for handle in waiting if not handle.poll()]
        assert time.monotonic() < deadline, f"{len(waiting)} of {len(handles)} handles are not complete"
        time.sleep(50e-6)


def end_of(operation: _native.ShmOperation, seconds: float = 5.0) -> int:
    """The state in which a native operation ends."""
    deadline = time.monotonic() + seconds
    while operation.state() == 0:
        assert time.monotonic() < deadline, "the operation does not end"
        time.sleep(1e-3)
    return operation.state()


class FileMeet:
    """A ``meet`` for processes: every call leaves one file per rank."""

    def __init__(self, directory: str, rank: int, size: int) -> None:
        self.seconds = 30.0
        self.calls = 0
        self._directory, self._rank, self._size = Path(directory), rank, size

    def __call__(self, message: bytes) -> list[bytes]:
        partial = self._directory / f"{self._rank}.partial"
        partial.write_bytes(message)
        partial.rename(self._directory / f"{self.calls}.{self._rank}")
        deadline = time.monotonic() + self.seconds
        files = [self._directory / f"{self.calls}.{other}" for other in range(self._size)]
        while not all(file.exists() for file in files):
            assert time.monotonic() < deadline, "not all ranks came"
            time.sleep(2e-3)
        self.calls += 1
        return [file.read_bytes() for file in files]


def sum_in_rank_order(arrays: Sequence[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """What an allreduce of them gives."""
    total = arrays[0].copy()
    with np.errstate(all="ignore"):
        for array in arrays[1:]:
            total += array
    return total
