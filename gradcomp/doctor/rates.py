"""Measures an allreduce and an all-to-all over the transport of a job; every function is collective over its ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import numpy as np

from gradcomp.core.errors import TransportError
from gradcomp.transport.base import Handle, Transport

_FIRST_BYTES, _LAST_BYTES, _LONG_SECONDS = 1 << 18, 1 << 26, 0.2
_SMALL, _SMALL_BYTES = 20, 256
_SILENCE_SECONDS = 30.0
_PAUSE_SECONDS = 20e-6


@dataclass(frozen=True)
class Rate:
    """One collective: its bytes on each rank, its seconds, and the bytes per second that a rank sends meanwhile."""

    collective: str
    nbytes: int
    seconds: float
    sent_per_second: float
    #: The seconds of the same collective with few bytes.
    small_seconds: float


def measure(transport: Transport) -> list[Rate]:
    """Return the rates of both collectives; TransportError if another rank does not take part in time."""
    share = (transport.size - 1) / transport.size

    def allreduce(nbytes: int) -> Callable[[], Handle]:
        array = np.zeros(nbytes // 4, dtype=np.float32)
        return lambda: transport.allreduce(array)

    def all_to_all(nbytes: int) -> Callable[[], Handle]:
        counts = [nbytes // transport.size] * transport.size
        send, recv = np.zeros((2, sum(counts)), dtype=np.uint8)
        return lambda: transport.alltoallv(send, counts, recv, counts)

    found = []
    for name, make, sent in (("allreduce", allreduce, 2 * share), ("all-to-all", all_to_all, share)):
        small = [_mean_seconds(transport, make(_SMALL_BYTES)) for _ in range(_SMALL)]
        nbytes = _FIRST_BYTES
        _mean_seconds(transport, make(nbytes))  # the first one makes connections
        while True:
            seconds = _mean_seconds(transport, make(nbytes))
            if seconds > _LONG_SECONDS or nbytes >= _LAST_BYTES:
                break
            nbytes *= 4 if seconds < _LONG_SECONDS / 8 else 2
        found.append(Rate(name, nbytes, seconds, sent * nbytes / seconds, median(small)))
    return found


def _mean_seconds(transport: Transport, start: Callable[[], Handle]) -> float:
    """Return the mean over ranks of a collective's time, the same number on all of them."""
    begin = time.perf_counter()
    _wait(start())
    seconds = np.array([time.perf_counter() - begin])
    _wait(transport.allreduce(seconds))  # the ranks begin the next one together, too
    return float(seconds[0]) / transport.size


def _wait(handle: Handle) -> None:
    deadline = time.monotonic() + _SILENCE_SECONDS
    while not handle.poll():
        if time.monotonic() > deadline:
            raise TransportError(f"a collective was not complete after {_SILENCE_SECONDS:.0f} s")
        time.sleep(_PAUSE_SECONDS)
