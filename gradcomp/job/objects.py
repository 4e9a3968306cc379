"""Broadcasts and gathers byte strings whose length only their own rank knows beforehand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gradcomp.core.errors import WireFormatError
from gradcomp.job.channel import Channel

#: The longest object that can be broadcast.
MOST_OBJECT_BYTES = 1 << 36


def broadcast_payload(channel: Channel, payload: bytes, length: int, root: int) -> bytes:
    """Return the root's ``payload`` on every rank; the root has announced ``length``. On the channel's thread.

    Raises WireFormatError, on every rank, for a length that no object has, and where there is no memory for it.
    """
    if not 0 <= length <= MOST_OBJECT_BYTES:
        raise WireFormatError(
            f"an object of {length} bytes was announced, at most {MOST_OBJECT_BYTES} are allowed"
        )
    try:
        held = bytearray(payload or length)
    except MemoryError as error:
        raise WireFormatError(
            f"an object of {length} bytes was announced, for which there is no memory"
        ) from error
    buffer = np.frombuffer(held, dtype=np.uint8)
    channel.broadcast(buffer, root)
    return bytes(held)


def gather_payloads(channel: Channel, payload: bytes, lengths: Sequence[int]) -> list[bytes]:
    """Return every rank's ``payload`` in rank order; the ranks have announced ``lengths``. On the channel's thread.

    Raises WireFormatError, on every rank, for a length that no object has.
    """
    if not all(0 <= length <= MOST_OBJECT_BYTES for length in lengths):
        raise WireFormatError(
            f"objects of {list(lengths)} bytes were announced, at most {MOST_OBJECT_BYTES} are allowed"
        )
    whole = channel.allgather(np.frombuffer(bytearray(payload), np.uint8), list(lengths))
    ends = np.cumsum(lengths).tolist()
    return [whole[end - length : end].tobytes() for end, length in zip(ends, lengths, strict=True)]
