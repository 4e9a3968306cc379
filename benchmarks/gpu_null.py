"""A transport that moves nothing: what a step costs beside the network."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from gradcomp.kernels.reference_headers import FIXED
from gradcomp.reduce.header import ByteHeader
from gradcomp.transport.base import Transport


class _Done:
    def poll(self) -> bool:
        return True


class NullTransport(Transport):
    """One of two ranks, of which the other does the same on the same gradients: every message is there at once.

    For scatter-reduce-allgather and sums, without checksums. A sum is twice this rank's; a chunk that is received is
    this rank's own, with the header of what it sends; the other's mean is what this rank has sent for it, with the
    number of the round set right. The bytes are copied in memory once, as a network's library does at least.

    ``payload_bytes``: of this rank's chunk, by bucket.
    """

    checksums = False

    def __init__(self, rank: int, payload_bytes: Sequence[int]) -> None:
        self.rank, self.size, self.bytes_sent = rank, 2, 0
        self._payload_bytes = payload_bytes
        self._sent: deque[Any] = deque()  # the other's chunk, bucket by bucket

    def allreduce(self, array: Any) -> _Done:
        self.bytes_sent += array.nbytes
        array += array
        return _Done()

    def alltoallv(
        self, send: Any, send_counts: Sequence[int], recv: Any, recv_counts: Sequence[int]
    ) -> _Done:
        travels = sum(send_counts)
        self.bytes_sent += travels
        self._sent.append(send[:travels])
        recv[:] = send[travels : travels + len(recv)]  # behind what travels lies the own chunk
        header = _fixed(send)
        begin = ByteHeader.size(int(header["layers"]))
        recv[:begin] = send[:begin]
        mine = _fixed(recv)
        mine["chunk"], mine["payload_bytes"] = self.rank, self._payload_bytes[int(header["bucket"])]
        mine["sender"] = 1 - self.rank
        return _Done()

    def allgatherv(self, buffer: Any, counts: Sequence[int]) -> _Done:
        self.bytes_sent += counts[self.rank]
        parts = buffer[: counts[0]], buffer[counts[0] :]
        theirs, mine = parts[1 - self.rank], parts[self.rank]
        theirs[:] = self._sent.popleft()
        _fixed(theirs)["round"], _fixed(theirs)["sender"] = _fixed(mine)["round"], 1 - self.rank
        return _Done()

    def close(self) -> None:
        """Nothing to release."""


def _fixed(message: Any) -> Any:
    """The fixed part of a header: a view."""
    return message.view(np.ndarray)[: FIXED.itemsize].view(FIXED)[0]
