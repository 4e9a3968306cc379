"""What a message between two ranks costs: measured once, the same figures on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter

import numpy as np

from gradcomp.transport.base import Handle, Transport, wait

#: Two sizes give latency and rate. The larger one fills the pipe, and takes 8 ms at 1 Gbit/s.
PROBE_BYTES = (1 << 10, 1 << 20)
_REPEATS = 5


def measure(transport: Transport, settle: Callable[[Handle], None] = wait) -> tuple[float, float]:
    """alpha (seconds) and beta (seconds per byte) of t(n) = alpha + beta n, for a message of n bytes.

    All ranks send to the next one at the same time, as reductions do. The slowest rank's median counts.
    Collective; wire: 6 messages of each size per rank, not counted in ``bytes_sent``, and one all-gather of 16 bytes.
    """
    rank, size = transport.rank, transport.size
    sent_before = transport.bytes_sent
    medians = []
    for nbytes in PROBE_BYTES:
        send, recv = np.zeros(nbytes, dtype=np.uint8), np.empty(nbytes, dtype=np.uint8)
        seconds = []
        for _ in range(1 + _REPEATS):
            begin = perf_counter()
            settle(transport.exchange([((rank + 1) % size, send)], [((rank - 1) % size, recv)]))
            seconds.append(perf_counter() - begin)
        medians.append(median(seconds[1:]))
    parts = transport.allgather_bytes(np.array(medians).tobytes(), settle)
    small, large = np.stack([np.frombuffer(part, dtype=np.float64) for part in parts]).max(axis=0).tolist()
    transport.bytes_sent = sent_before
    beta = max(large - small, 1e-9) / (PROBE_BYTES[1] - PROBE_BYTES[0])
    return max(small - beta * PROBE_BYTES[0], 1e-9), beta
