"""Records what simulated ranks send."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gradcomp.reduce.header import FIXED, ByteHeader, padded
from gradcomp.transport.base import Messages
from gradcomp.transport.inprocess import InProcessTransport, World

Array = np.ndarray[Any, Any]


def payload_of(message: Any) -> Array:
    """Returns the payload of one message of bytes, as described by its header, without header and padding."""
    data = np.frombuffer(bytes(message), np.uint8)
    fixed = data[: FIXED.itemsize].view(FIXED)[0]
    begin = ByteHeader.size(int(fixed["layers"]))
    return data[begin : begin + int(fixed["payload_bytes"])]


def announced_payload(sent: Sequence[tuple[str, bytes]]) -> Array:
    """Returns what a rank gathered in one step, of one group whose size varies.

    The first message holds the size and the beginning of the payload, a second one the rest.
    """
    first, *rest = [payload_of(data) for _, data in sent]
    size = int(first[:8].view("<i8")[0])
    return np.concatenate([first[padded(8) :], *rest])[:size]


class RecordingTransport(InProcessTransport):
    """Records what its rank sends: (kind, bytes) per collective."""

    def __init__(self, world: World, rank: int) -> None:
        super().__init__(world, rank)
        self.sent: list[tuple[str, bytes]] = []

    def allreduce(self, array: Array) -> Any:
        self.sent.append(("allreduce", array.tobytes()))
        return super().allreduce(array)

    def alltoallv(
        self, send: Array, send_counts: Sequence[int], recv: Array, recv_counts: Sequence[int]
    ) -> Any:
        self.sent.append(("alltoallv", send[: sum(send_counts)].tobytes()))
        return super().alltoallv(send, send_counts, recv, recv_counts)

    def allgatherv(self, buffer: Array, counts: Sequence[int]) -> Any:
        start = sum(counts[: self.rank])
        self.sent.append(("allgatherv", buffer[start : start + counts[self.rank]].tobytes()))
        return super().allgatherv(buffer, counts)

    def exchange(self, sends: Messages, recvs: Messages) -> Any:
        self.sent.append(("exchange", b"".join(message.tobytes() for _, message in sends)))
        return super().exchange(sends, recvs)
