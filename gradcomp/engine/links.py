"""The cost of a message and of a pass of the codec is measured once; all ranks get the same figures."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter

import numpy as np

from gradcomp.core.topology import Topology
from gradcomp.kernels.codec import Codec, Draw
from gradcomp.kernels.segments import FLOAT32, MINMAX, SEGMENT
from gradcomp.reduce.model import Network
from gradcomp.transport.base import Handle, Transport, wait

#: Messages of two sizes give latency and rate. The larger one takes 8 ms at 1 Gbit/s.
PROBE_BYTES = (1 << 10, 1 << 20)
_REPEATS = 5
_ELEMENTS = 1 << 18
_LEAST = 1e-9  # seconds; a measured time of 0 would make a rate infinite


def measure(transport: Transport, topology: Topology, wait_for: Callable[[Handle], None] = wait) -> Network:
    """Measure alpha and beta of t(n) = alpha + beta n between hosts and inside them, and the rates of a 4-bit codec.

    All ranks send n bytes to the next rank at the same time, as reductions do; the slowest rank's median counts,
    apart for those whose next rank is on another host. Where no message stays inside a host, it costs nothing
    there. Collective, outside of steps; ``wait_for`` waits for a handle. Wire: 6 messages of 1 KiB and of 1 MiB per
    rank, not counted in ``bytes_sent``, and one all-gather of 32 bytes. :class:`gradcomp.reduce.model.Network` says
    what the figures are for.
    """
    sent_before = transport.bytes_sent
    own = np.array([*(shift(transport, nbytes, wait_for) for nbytes in PROBE_BYTES), *_codec_rates()])
    parts = transport.allgather_bytes(own.tobytes(), wait_for)
    transport.bytes_sent = sent_before
    everyone = np.stack([np.frombuffer(part, dtype=np.float64) for part in parts])
    hosts = np.asarray(topology.hosts)
    crosses = hosts != np.roll(hosts, -1)
    alpha, beta = _fit(everyone[crosses, :2]) if crosses.any() else (0.0, 0.0)
    local_alpha, local_beta = _fit(everyone[~crosses, :2]) if not crosses.all() else (0.0, 0.0)
    encode_rate, decode_rate = everyone[:, 2:].min(axis=0).tolist()
    return Network(alpha, beta, encode_rate, decode_rate, local_alpha, local_beta)


def _fit(seconds: np.ndarray[tuple[int, int], np.dtype[np.float64]]) -> tuple[float, float]:
    """Return latency and seconds per byte of a line through both sizes."""
    small, large = seconds.max(axis=0).tolist()
    beta = max(large - small, _LEAST) / (PROBE_BYTES[1] - PROBE_BYTES[0])
    return max(small - beta * PROBE_BYTES[0], _LEAST), beta


def shift(transport: Transport, nbytes: int, wait_for: Callable[[Handle], None] = wait) -> float:
    """Return the median seconds in which every rank sends to the next and receives from the previous one. Collective.

    The bytes are not counted in ``bytes_sent``. ``wait_for`` waits for a handle.
    """
    rank, size = transport.rank, transport.size
    send, recv = np.zeros(nbytes, dtype=np.uint8), np.empty(nbytes, dtype=np.uint8)
    sent_before = transport.bytes_sent
    seconds = _median(
        lambda: wait_for(transport.exchange([((rank + 1) % size, send)], [((rank - 1) % size, recv)]))
    )
    transport.bytes_sent = sent_before
    return seconds


def _codec_rates() -> tuple[float, float]:
    """Return the bytes of float32 that this core encodes and decodes per second."""
    values = np.random.default_rng(0).standard_normal(_ELEMENTS).astype(np.float32)
    table = np.zeros(1, dtype=SEGMENT)
    table["length"], table["level"], table["bucket_size"], table["dtype"] = _ELEMENTS, 4, 512, FLOAT32
    table["gradient"] = table["output"] = values.ctypes.data
    codec, flags = Codec(MINMAX), np.zeros(1, dtype=np.uint8)
    payload = np.zeros(int(codec.wire_bytes(table).sum()), dtype=np.uint8)
    encode = _median(lambda: codec.encode(table, payload, flags, Draw(0, 0, 0)))
    decode = _median(lambda: codec.decode(table, payload, flags))
    return values.nbytes / encode, values.nbytes / decode


def _median(work: Callable[[], None]) -> float:
    seconds = []
    for _ in range(1 + _REPEATS):
        begin = perf_counter()
        work()
        seconds.append(perf_counter() - begin)
    return max(median(seconds[1:]), _LEAST)
