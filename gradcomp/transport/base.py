"""The interface of transports: the collectives that a reduction may request, and the handles that they return."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
import numpy.typing as npt

from gradcomp.core.errors import WireFormatError
from gradcomp.kernels.cuda.mirrors import Spans
from gradcomp.kernels.devices import Device

Bytes = npt.NDArray[np.uint8]

#: The largest message that a rank may announce outside of steps; the largest ones are sparse rows.
MOST_MESSAGE_BYTES = 1 << 34

T = TypeVar("T")

#: Allocates this many bytes for messages, filled with zeros. The spans are ascending ranges of bytes, from the first up
#: to but not including the second number, that Python code may read and write; only kernels touch all other bytes.
Allocator = Callable[[int, Spans], Bytes]


def host_allocator(nbytes: int, headers: Spans) -> Bytes:  # noqa: ARG001 - Python code may touch every byte
    """Allocate messages in host memory, all of which Python code may read and write."""
    return np.zeros(nbytes, dtype=np.uint8)


class Handle(Protocol):
    """Tracks a collective that has been issued."""

    def poll(self) -> bool:
        """Return true once the collective is complete on this rank; raise TransportError if it failed. Never blocks."""
        ...


@runtime_checkable
class BlockingHandle(Handle, Protocol):
    """Lets a thread wait without polling: where cores are few, polls take time from the threads that send."""

    def block(self, seconds: float) -> None:
        """Return once the collective is complete or has failed, at the latest after ``seconds``. Raises nothing."""
        ...


class Done:
    """Represents a collective that had nothing to do and is complete."""

    def poll(self) -> bool:
        return True


#: Starts a collective.
Start = Callable[[], Handle]

#: Pairs of a rank and the bytes that go to it or come from it.
Messages = Sequence[tuple[int, Bytes]]


#: The processor's seconds for a byte over Gloo: steps of an LSTM and a GPT on links without a limit, and Gloo's thread
#: with 1 Gbit/s, took 0.8 to 1.1 ns.
GLOO_BYTE_SECONDS = 1e-9


class Transport(ABC):
    """Runs non-blocking collectives over one communicator, which belongs to one exchanger.

    All ranks issue the same collectives in the same order. Arrays are one-dimensional and contiguous, and the caller
    must not touch them until the handle is complete. ``bytes_sent`` counts the payload bytes that this rank sent to
    other ranks.
    """

    rank: int
    size: int
    bytes_sent: int = 0
    #: True if Python code can read the messages that it sends, as checksums need; messages on a GPU it cannot read.
    checksums: bool = True
    #: True if an engine inside each host sums to one of its ranks, for :mod:`gradcomp.transport.two_level`.
    reduces_inside: bool = False
    #: The processor's seconds for a byte that this rank sends and one that it receives; 0 where nothing was measured.
    byte_seconds: float = 0.0

    @abstractmethod
    def allreduce(self, array: npt.NDArray[Any]) -> Handle:
        """Sum ``array`` (float32 or float64) over ranks, in place; the result has the same bits on all ranks.

        Wire: 2 d (N-1)/N bytes per rank for an array of d bytes.
        """

    @abstractmethod
    def alltoallv(
        self, send: Bytes, send_counts: Sequence[int], recv: Bytes, recv_counts: Sequence[int]
    ) -> Handle:
        """Send ``send_counts[j]`` bytes, consecutive in ``send``, to rank j; receive likewise.

        Wire: the sum of the send counts in bytes, without that for this rank.
        """

    @abstractmethod
    def allgatherv(self, buffer: Bytes, counts: Sequence[int]) -> Handle:
        """Fill ``buffer`` with every rank's part; part i has ``counts[i]`` bytes, and parts are in rank order.

        The caller has written its own part.

        Wire: N-1 times the bytes of this rank's part.
        """

    def prepare_alltoallv(
        self, send: Bytes, send_counts: Sequence[int], recv: Bytes, recv_counts: Sequence[int]
    ) -> Start:
        """Return a function that starts :meth:`alltoallv` with these arguments.

        A collective of a step recurs with the same buffers. Transports override this method and
        :meth:`prepare_allgatherv` if they can look things up once.
        """
        return lambda: self.alltoallv(send, send_counts, recv, recv_counts)

    def prepare_allgatherv(self, buffer: Bytes, counts: Sequence[int]) -> Start:
        """Return a function that starts :meth:`allgatherv` with these arguments."""
        return lambda: self.allgatherv(buffer, counts)

    def exchange(self, sends: Messages, recvs: Messages) -> Handle:
        """Send each array in ``sends`` to its rank and fill each array in ``recvs`` from its rank.

        A rank sends at most one message to each other rank, and none to itself; both sides know the lengths from the
        plan. All ranks call it in the same order as collectives, with empty lists if they have nothing to send or
        receive. This implementation calls :meth:`alltoallv` with buffers in rank order; transports whose engine can
        poll messages between two ranks override it.

        Wire: the sum of the lengths of ``sends``.
        """
        sent, received, nothing = dict(sends), dict(recvs), np.zeros(0, dtype=np.uint8)
        assert max((*sent, *received), default=0) < self.size, "a message for no rank"
        parts = [sent.get(rank, nothing) for rank in range(self.size)]
        recv_counts = [len(received.get(rank, nothing)) for rank in range(self.size)]
        recv = recvs[0][1] if len(recvs) == 1 else np.empty(sum(recv_counts), dtype=np.uint8)
        send = sends[0][1] if len(sends) == 1 else np.concatenate(parts)
        handle = self.alltoallv(send, [len(part) for part in parts], recv, recv_counts)
        return handle if len(recvs) <= 1 else _Unpack(handle, recv, recvs)

    def allocator(self, device: Device) -> Allocator:
        """Return an allocator for messages that kernels of ``device`` write or read.

        It allocates on the device if the engine can send from there.
        """
        return host_allocator

    def abandon(self) -> None:  # noqa: B027 - most engines have nothing to do here
        """Give the communicator up after a failure, when some collectives may never end.

        It must not block, and may be called again.
        """

    @abstractmethod
    def close(self) -> None:
        """Release the communicator. The call is collective where the engine needs that, and idempotent."""

    def allgather_bytes(
        self, payload: bytes, wait_for: Callable[[Handle], None] | None = None
    ) -> list[bytes]:
        """Gather every rank's bytes, of any length, in rank order; it blocks, so it is for use outside of steps.

        ``wait_for`` waits for a handle; the default is :func:`wait`.
        """
        wait_for = wait_for or wait
        sizes = np.zeros(self.size, dtype=np.int64)
        sizes[self.rank] = len(payload)
        wait_for(self.allgatherv(sizes.view(np.uint8), [8] * self.size))
        if sizes.min() < 0 or sizes.max() > MOST_MESSAGE_BYTES:
            raise WireFormatError(
                f"the ranks announced messages of {sizes.tolist()} bytes, which must be in 0..{MOST_MESSAGE_BYTES}"
            )
        buffer = np.zeros(int(sizes.sum()), dtype=np.uint8)
        parts = parts_of(buffer, sizes.tolist())
        parts[self.rank][:] = np.frombuffer(payload, dtype=np.uint8)
        wait_for(self.allgatherv(buffer, sizes.tolist()))
        return [part.tobytes() for part in parts]


@runtime_checkable
class Rooted(Protocol):
    """Lets an engine sum to one rank, and send from one rank to all, each in one collective."""

    def reduce(self, array: npt.NDArray[np.float32], root: int) -> Handle:
        """Sum ``array`` over ranks, in the engine's order, in place on ``root``; other ranks' arrays do not change.

        Wire: d bytes from every rank but the root, for an array of d bytes.
        """
        ...

    def broadcast(self, buffer: Bytes, root: int) -> Handle:
        """Fill ``buffer`` on all ranks with the bytes that it has on ``root``.

        Wire: d (N-1) bytes for a buffer of d bytes, which count as the root's, whichever rank forwards them.
        """
        ...


class PointToPoint(Transport):
    """Sends every part of an all-to-all and of an all-gather as one message between two ranks."""

    def alltoallv(
        self, send: Bytes, send_counts: Sequence[int], recv: Bytes, recv_counts: Sequence[int]
    ) -> Handle:
        sent, received = parts_of(send, send_counts), parts_of(recv, recv_counts)
        received[self.rank][:] = sent[self.rank]
        return self.exchange(self._to_others(sent), self._to_others(received))

    def allgatherv(self, buffer: Bytes, counts: Sequence[int]) -> Handle:
        parts = parts_of(buffer, counts)
        return self.exchange(self._to_others([parts[self.rank]] * self.size), self._to_others(parts))

    def _to_others(self, parts: Sequence[Bytes]) -> Messages:
        # Both ranks know the lengths, so a message of no bytes need not travel.
        return [(rank, part) for rank, part in enumerate(parts) if rank != self.rank and len(part)]


def parts_of(buffer: Bytes, counts: Sequence[int]) -> list[Bytes]:
    """Return views of the consecutive parts of ``buffer``."""
    ends = list(accumulate(counts))
    return [buffer[end - count : end] for end, count in zip(ends, counts, strict=True)]


@dataclass(eq=False)
class _Unpack:
    """Copies the messages of an exchange from one buffer, where they arrive in rank order, to their arrays."""

    handle: Handle
    buffer: Bytes
    recvs: Messages

    def poll(self) -> bool:
        if not self.handle.poll():
            return False
        arrays = [array for _, array in sorted(self.recvs, key=lambda message: message[0])]
        for array, part in zip(arrays, parts_of(self.buffer, list(map(len, arrays))), strict=True):
            array[:] = part
        self.recvs = ()
        return True


def in_time(make: Callable[[], T], seconds: float, thread_name: str) -> T | None:
    """Return ``make()``, run by another thread; None if it takes longer. Engines wait for ranks without a deadline."""
    made: list[T] = []
    failed: list[BaseException] = []

    def work() -> None:
        try:
            made.append(make())
        except BaseException as error:  # noqa: BLE001 - the calling thread raises it
            failed.append(error)

    thread = threading.Thread(target=work, name=thread_name, daemon=True)
    thread.start()
    thread.join(seconds)
    if failed:
        raise failed[0]
    return made[0] if made else None


def wait(handle: Handle) -> None:
    """Poll until the collective is complete.

    It is for construction and checkpoints only: in steps the engine polls, and watches the other ranks meanwhile.
    """
    pause = 20e-6
    while not handle.poll():
        time.sleep(pause)
        pause = min(2 * pause, 2e-3)


class Operation(ABC):
    """Requests a collective, for as often as :meth:`issue` starts it; buffers and lengths stay the same.

    Once it was issued, ``senders`` has the ranks whose bytes must arrive before it is complete.
    """

    senders: tuple[int, ...] = ()
    _prepared: tuple[Transport, Start] | None = None

    def issue(self, transport: Transport) -> Handle:
        """Start the collective; what the transport looks up is kept for the next start."""
        if self._prepared is None or self._prepared[0] is not transport:
            self._prepared = transport, self._prepare(transport)
            self.senders = tuple(rank for rank in self._senders(transport) if rank != transport.rank)
        return self._prepared[1]()

    @abstractmethod
    def _prepare(self, transport: Transport) -> Start: ...

    @abstractmethod
    def _senders(self, transport: Transport) -> Iterable[int]: ...


@dataclass(eq=False)
class AllReduce(Operation):
    """Requests a :meth:`Transport.allreduce`."""

    array: npt.NDArray[Any]

    def _prepare(self, transport: Transport) -> Start:
        return partial(transport.allreduce, self.array)

    def _senders(self, transport: Transport) -> Iterable[int]:
        return range(transport.size)


@dataclass(eq=False)
class AllToAll(Operation):
    """Requests a :meth:`Transport.alltoallv`."""

    send: Bytes
    send_counts: Sequence[int]
    recv: Bytes
    recv_counts: Sequence[int]

    def _prepare(self, transport: Transport) -> Start:
        return transport.prepare_alltoallv(self.send, self.send_counts, self.recv, self.recv_counts)

    def _senders(self, transport: Transport) -> Iterable[int]:
        return (rank for rank, count in enumerate(self.recv_counts) if count)


@dataclass(eq=False)
class AllGather(Operation):
    """Requests a :meth:`Transport.allgatherv`."""

    buffer: Bytes
    counts: Sequence[int]

    def _prepare(self, transport: Transport) -> Start:
        return transport.prepare_allgatherv(self.buffer, self.counts)

    def _senders(self, transport: Transport) -> Iterable[int]:
        return (rank for rank, count in enumerate(self.counts) if count)


@dataclass(eq=False)
class Exchange(Operation):
    """Requests a :meth:`Transport.exchange`."""

    sends: Messages
    recvs: Messages

    def _prepare(self, transport: Transport) -> Start:
        return partial(transport.exchange, self.sends, self.recvs)

    def _senders(self, transport: Transport) -> Iterable[int]:
        return (rank for rank, _ in self.recvs)
