"""Records what simulated ranks send."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gradcomp.kernels.reference_headers import FIXED
from gradcomp.reduce.header import ByteHeader, padded
from gradcomp.transport.base import parts_of
from gradcomp.transport.inprocess import InProcessTransport, World

Array = np.ndarray[Any, Any]


def payload_of(message: Any) -> Array:
    """Returns the payload of one message of bytes, as described by its header, without header and padding."""
    data = np.frombuffer(bytes(message), np.uint8)
    fixed = data[: FIXED.itemsize].view(FIXED)[0]
    begin = ByteHeader.size(int(fixed["layers"]))
    return data[begin : begin + int(fixed["payload_bytes"])]


def announced_payload(sent: Sequence[tuple[str, bytes]]) -> Array:
    """Returns the payload that a rank sent in one step in a Gather of varying size.

    The first message holds the size and the beginning of the payload, a second one the rest.
    """
    first, *rest = [payload_of(data) for _, data in sent]
    size = int(first[:8].view("<i8")[0])
    return np.concatenate([first[padded(8) :], *rest])[:size]


class RecordingTransport(InProcessTransport):
    """Records the messages that its rank sends: (kind, bytes) per collective."""

    def __init__(self, world: World, rank: int) -> None:
        super().__init__(world, rank)
        self.sent: list[tuple[str, bytes]] = []

    def _join(self, kind: str, *arguments: Any) -> Any:
        match kind, arguments:
            case "allreduce", (array,):
                sent = [array]
            case "alltoallv", (send, send_counts, *_):
                sent = [send[: sum(send_counts)]]
            case "allgatherv", (buffer, counts):
                sent = [parts_of(buffer, counts)[self.rank]]
            case _:
                sent = [message for _, message in arguments[0]]
        self.sent.append((kind, b"".join(array.tobytes() for array in sent)))
        return super()._join(kind, *arguments)
