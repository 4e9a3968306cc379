"""The second vocabulary: what a reduction may ask of a transport."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from gradcomp.core.errors import WireFormatError
from gradcomp.kernels.cuda.mirrors import Spans
from gradcomp.kernels.devices import Device

Bytes = npt.NDArray[np.uint8]

#: What a rank may announce outside of steps: sparse rows are the largest such messages.
MOST_MESSAGE_BYTES = 1 << 34


#: Makes room for so many bytes of messages, zeros. Outside of the spans, from a byte up to another, ascending, only
#: kernels touch them.
Allocator = Callable[[int, Spans], Bytes]


def host_allocator(nbytes: int, headers: Spans) -> Bytes:  # noqa: ARG001 - it is all one here
    """In this process's memory, all of which it may touch."""
    return np.zeros(nbytes, dtype=np.uint8)


class Handle(Protocol):
    """A collective under way."""

    def poll(self) -> bool:
        """True once the collective is complete here; raises TransportError if it failed. Never blocks."""
        ...


@runtime_checkable
class BlockingHandle(Handle, Protocol):
    """A collective for which a thread can wait without polling: on few cores polls take time from those who send."""

    def block(self, seconds: float) -> None:
        """Return once it is complete or has failed, at the latest after so many seconds. Raises nothing."""
        ...


#: Ranks, and the bytes that go to or come from them.
Messages = Sequence[tuple[int, Bytes]]


class Transport(ABC):
    """Non-blocking collectives over one communicator that belongs to one exchanger.

    All ranks issue the same collectives in the same order. Arrays are one-dimensional and contiguous and stay
    untouched by the caller until the handle is complete. ``bytes_sent`` counts the payload bytes that this rank sent to
    other ranks.
    """

    rank: int
    size: int
    bytes_sent: int = 0
    #: Whether this program can read the messages that it sends, as checksums need: not where they lie on a GPU.
    checksums: bool = True

    @abstractmethod
    def allreduce(self, array: npt.NDArray[Any]) -> Handle:
        """Sum ``array`` (float32 or float64) over ranks, in place; bit-identical on all ranks.

        Wire: 2 d (N-1)/N bytes per rank for an array of d bytes.
        """

    @abstractmethod
    def alltoallv(
        self, send: Bytes, send_counts: Sequence[int], recv: Bytes, recv_counts: Sequence[int]
    ) -> Handle:
        """Send ``send_counts[j]`` bytes, consecutive in ``send``, to rank j; receive likewise.

        Wire: the sum of the send counts, without the own one.
        """

    @abstractmethod
    def allgatherv(self, buffer: Bytes, counts: Sequence[int]) -> Handle:
        """Fill ``buffer`` with every rank's part; part i has ``counts[i]`` bytes and lies behind the parts before it.

        The caller has written its own part. Wire: (N-1) times the own part.
        """

    def exchange(self, sends: Messages, recvs: Messages) -> Handle:
        """Send each array in ``sends`` to its rank and fill each array in ``recvs`` from its rank.

        At most one message from a rank to another, none to itself; lengths follow from the plan on both sides. Every
        rank calls it in the same order as all collectives, one that has nothing to send or receive with empty lists.
        Here by :meth:`alltoallv`, through buffers in rank order; engines whose messages between two ranks can be
        polled do without.

        Wire: the lengths of what is sent.
        """
        parts = _in_rank_order(sends, self.size)
        recv_counts = [len(part) for part in _in_rank_order(recvs, self.size)]
        recv = recvs[0][1] if len(recvs) == 1 else np.empty(sum(recv_counts), dtype=np.uint8)
        send = sends[0][1] if len(sends) == 1 else np.concatenate(parts)
        handle = self.alltoallv(send, [len(part) for part in parts], recv, recv_counts)
        return handle if len(recvs) <= 1 else _Unpack(handle, recv, recvs)

    def allocator(self, device: Device) -> Allocator:
        """What makes room for messages between kernels of ``device``: on it, if the engine takes them from there."""
        return host_allocator

    def abandon(self) -> None:  # noqa: B027 - most engines have nothing to do here
        """Called once after a failure, when collectives may be left that never end. Must not block."""

    @abstractmethod
    def close(self) -> None:
        """Release the communicator. Collective where the engine needs it; idempotent."""

    def allgather_bytes(
        self, payload: bytes, wait_for: Callable[[Handle], None] | None = None
    ) -> list[bytes]:
        """Blocking helper outside of steps: every rank's bytes, of any length, in rank order.

        ``wait_for`` waits for a handle; by default :func:`wait`.
        """
        wait_for = wait_for or wait
        sizes = np.zeros(self.size, dtype=np.int64)
        sizes[self.rank] = len(payload)
        wait_for(self.allgatherv(sizes.view(np.uint8), [8] * self.size))
        if sizes.min() < 0 or sizes.max() > MOST_MESSAGE_BYTES:
            raise WireFormatError(f"message sizes {sizes.tolist()} are not in 0..{MOST_MESSAGE_BYTES}")
        buffer = np.zeros(int(sizes.sum()), dtype=np.uint8)
        bounds = np.concatenate(([0], np.cumsum(sizes)))
        buffer[bounds[self.rank] : bounds[self.rank + 1]] = np.frombuffer(payload, dtype=np.uint8)
        wait_for(self.allgatherv(buffer, sizes.tolist()))
        return [buffer[bounds[i] : bounds[i + 1]].tobytes() for i in range(self.size)]


def parts_of(buffer: Bytes, counts: Sequence[int]) -> list[Bytes]:
    """Views of the parts that lie one behind the other in ``buffer``."""
    ends = list(accumulate(counts))
    return [buffer[end - count : end] for end, count in zip(ends, counts, strict=True)]


def _in_rank_order(messages: Messages, size: int) -> list[Bytes]:
    parts = [np.zeros(0, dtype=np.uint8)] * size
    for rank, array in messages:
        parts[rank] = array
    return parts


@dataclass(eq=False)
class _Unpack:
    """An exchange that arrives in one buffer, in rank order."""

    handle: Handle
    buffer: Bytes
    recvs: Messages

    def poll(self) -> bool:
        if not self.handle.poll():
            return False
        at = 0
        for _, array in sorted(self.recvs, key=lambda message: message[0]):
            array[:] = self.buffer[at : at + len(array)]
            at += len(array)
        self.recvs = ()
        return True


def wait(handle: Handle) -> None:
    """Poll until complete. For construction and checkpoints only; the engine has its own, watched loop."""
    pause = 20e-6
    while not handle.poll():
        time.sleep(pause)
        pause = min(2 * pause, 2e-3)


@dataclass(frozen=True, eq=False)
class AllReduce:
    """Request for :meth:`Transport.allreduce`."""

    array: npt.NDArray[Any]

    def issue(self, transport: Transport) -> Handle:
        """Start it."""
        return transport.allreduce(self.array)


@dataclass(frozen=True, eq=False)
class AllToAll:
    """Request for :meth:`Transport.alltoallv`."""

    send: Bytes
    send_counts: Sequence[int]
    recv: Bytes
    recv_counts: Sequence[int]

    def issue(self, transport: Transport) -> Handle:
        """Start it."""
        return transport.alltoallv(self.send, self.send_counts, self.recv, self.recv_counts)


@dataclass(frozen=True, eq=False)
class AllGather:
    """Request for :meth:`Transport.allgatherv`."""

    buffer: Bytes
    counts: Sequence[int]

    def issue(self, transport: Transport) -> Handle:
        """Start it."""
        return transport.allgatherv(self.buffer, self.counts)


@dataclass(frozen=True, eq=False)
class Exchange:
    """Request for :meth:`Transport.exchange`."""

    sends: Messages
    recvs: Messages

    def issue(self, transport: Transport) -> Handle:
        """Start it."""
        return transport.exchange(self.sends, self.recvs)


Operation = AllReduce | AllToAll | AllGather | Exchange
