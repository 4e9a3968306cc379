"""Shared memory for the ranks of one host: the one engine that gradcomp writes itself.

**Memory.** The ranks of a communicator share one segment: an anonymous file (memfd) that rank 0 makes and the
others open through ``/proc``, so the ranks need one host, one user and one view of process numbers (one container,
or containers that share a PID namespace). It has no name: nothing is left behind by a crash, nothing lies about
from a killed run, ``/dev/shm`` and a container's limit on it play no part, and no other user can open it. It is
sealed, so that no rank can cut it short under another, and wholly allocated at the start: too little memory is an
error then, never a signal later.

It holds one ring per ordered pair of ranks and one per rank that all others read, N x N for N ranks. A ring has 1
MiB while all take at most 4 MiB together, which a processor's cache holds; less with more ranks, at least 64 KiB::

    ranks           2     4    8   16   32    64
    KiB per ring 1024   256   64   64   64    64
    MiB in all      4     4    4   16   64   256

(``ring_bytes`` chooses otherwise; powers of two.)

**Progress.** One native thread per transport moves the bytes, so calls return at once and computation goes on. It
sleeps on a futex in the segment, which another rank rings, and every 0.1 s looks whether the others live, if it
waits for one. Copies to and from the rings are done by blocks of 64 KiB, which stay in the processor's cache
between writer and reader. A call, and a poll of what is not complete, moves up to 4 KiB through each ring itself:
small messages need no turn of the thread, for which they would have to wait where all processors are busy.

**Collectives.** Point-to-point messages go through the ring of their pair, all-gathered parts once through the ring
that all read. ``allreduce`` cuts the array into one chunk per rank; its owner adds what arrives to its own part, in
rank order, a block at a time, and sends every block on to all: the sum is the same bytes everywhere.

**Failure.** A rank that ends, however, or closes while another needs it, is a TransportError on every other rank
that waits, and names it, at the latest 0.2 s later. A number in the segment that cannot be (a position, a message's
length or its collective) is a TransportError too: nothing that another process wrote is believed.
"""

from __future__ import annotations

import struct
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt

from gradcomp import _native
from gradcomp.core.errors import ConfigError, GradcompError, PlanMismatchError, TransportError
from gradcomp.core.text import printable
from gradcomp.transport.base import Bytes, Messages, Transport

#: Called with bytes of this rank: returns every rank's, in rank order. Collective and blocking.
Meet = Callable[[bytes], list[bytes]]

LARGEST_RING_BYTES = 1 << 20
SMALLEST_RING_BYTES = 1 << 16
#: What all rings take together, as long as none is smaller than the smallest.
RINGS_BYTES = 1 << 22

# Settings, then where rank 0's segment is: process, its start, file descriptor, nonce.
_FIRST = struct.Struct("<QQqQqQ")
_SECOND = struct.Struct("<qQ")
_PENDING, _DONE, _FAILED = 0, 1, 2


def ring_bytes_for(size: int) -> int:
    """The length of a ring among ``size`` ranks, unless another is asked for."""
    ring_bytes = LARGEST_RING_BYTES
    while ring_bytes > SMALLEST_RING_BYTES and size * size * ring_bytes > RINGS_BYTES:
        ring_bytes //= 2
    return ring_bytes


@dataclass(eq=False)
class _Done:
    """A collective of one rank."""

    def poll(self) -> bool:
        return True


@dataclass(eq=False)
class _Call:
    """A collective under way, with the arrays that the thread reads and writes; both are let go once it has ended."""

    operation: _native.ShmOperation | None
    arguments: Any
    state: int = _PENDING

    def look(self) -> int:
        operation = self.operation
        if operation is not None and (state := operation.state()) != _PENDING:
            self.state, self.operation, self.arguments = state, None, None
        return self.state


@dataclass(eq=False)
class _Held:
    """This rank of the segment, and what its thread may still read and write.

    :meth:`close` lets go of all that is native, so that nothing of it is alive when the program ends, whoever still
    holds the transport or a handle then: a global optimizer's hooks, for example, are not freed at all.
    """

    native: _native.ShmRank | None
    calls: deque[_Call] = field(default_factory=deque)
    failure: str = ""

    def close(self) -> None:
        native = self.native
        if native is None:
            return
        native.close()
        try:
            self.failure = native.failure()
        except RuntimeError as error:  # in a forked child, which has nothing to close
            self.failure = str(error)
        self.native = None
        for call in list(self.calls):  # another thread may be adding one, which has failed
            call.look()


@dataclass(eq=False)
class _Handle:
    call: _Call
    transport: ShmTransport

    def poll(self) -> bool:
        if self.call.look() == _PENDING:
            self.transport._help()
        if self.call.look() == _PENDING:
            return False
        self.transport._forget_finished()
        if self.call.state != _DONE:
            raise TransportError(self.transport.failure)
        return True


class ShmTransport(Transport):
    """Collectives among ``size`` ranks on one host, through memory that they share.

    ``meet`` brings the ranks together, twice; afterwards it is not used. A forked child cannot use the transport.

    Raises ConfigError for a ``ring_bytes`` that is no power of two from 4096 to 2^30; PlanMismatchError where ranks
    have other settings; TransportError on every rank if one of them cannot make, open or map the segment.
    """

    def __init__(self, rank: int, size: int, meet: Meet, ring_bytes: int | None = None) -> None:
        if not 0 <= rank < size:
            raise ConfigError(f"rank {rank} is not in 0 .. {size - 1}")
        self.rank = rank
        self.size = size
        self.bytes_sent = 0
        self.ring_bytes = ring_bytes_for(size) if ring_bytes is None else ring_bytes
        if self.ring_bytes & (self.ring_bytes - 1) or not 4096 <= self.ring_bytes <= 1 << 30:
            raise ConfigError(f"ring_bytes={ring_bytes} is no power of two from 4096 to 2^30")
        # What the thread reads and writes lives until it is done with it, whatever becomes of the handles.
        self._held = _Held(_join(rank, size, meet, self.ring_bytes) if size > 1 else None)
        self._close = weakref.finalize(self, self._held.close)

    def allreduce(self, array: npt.NDArray[Any]) -> _Handle | _Done:
        """See :class:`Transport`; added in rank order."""
        if self.size == 1:
            return _Done()
        self.bytes_sent += 2 * array.nbytes * (self.size - 1) // self.size
        return self._issue("allreduce", array)

    def alltoallv(
        self, send: Bytes, send_counts: Sequence[int], recv: Bytes, recv_counts: Sequence[int]
    ) -> _Handle | _Done:
        """See :class:`Transport`."""
        if self.size == 1:
            recv[: recv_counts[0]] = send[: send_counts[0]]
            return _Done()
        self.bytes_sent += sum(send_counts) - send_counts[self.rank]
        return self._issue("alltoallv", send, send_counts, recv, recv_counts)

    def allgatherv(self, buffer: Bytes, counts: Sequence[int]) -> _Handle | _Done:
        """See :class:`Transport`."""
        if self.size == 1:
            return _Done()
        self.bytes_sent += (self.size - 1) * counts[self.rank]
        return self._issue("allgatherv", buffer, counts)

    def exchange(self, sends: Messages, recvs: Messages) -> _Handle | _Done:
        """See :class:`Transport`."""
        if self.size == 1:
            return _Done()
        self.bytes_sent += sum(len(array) for _, array in sends)
        return self._issue(
            "exchange",
            [to for to, _ in sends],
            [array for _, array in sends],
            [source for source, _ in recvs],
            [array for _, array in recvs],
        )

    @property
    def failure(self) -> str:
        """Why the transport can do no more; empty as long as it can."""
        native = self._held.native
        return self._held.failure if native is None else native.failure()

    def abandon(self) -> None:
        """Fail what is under way, here and on the other ranks."""
        native = self._held.native
        if native is not None:
            native.abandon()

    def close(self) -> None:
        """Leave. A rank that still needs this one fails."""
        self._close()

    def _issue(self, name: str, *arguments: Any) -> _Handle:
        self._forget_finished()
        native = self._held.native
        if native is None:
            return _Handle(_Call(None, None, _FAILED), self)
        try:
            call = _Call(getattr(native, name)(*arguments), arguments)
        except RuntimeError as error:
            raise TransportError(str(error)) from error
        self._held.calls.append(call)
        return _Handle(call, self)

    def _help(self) -> None:
        native = self._held.native
        try:
            if native is not None:
                native.help()
        except RuntimeError as error:
            raise TransportError(str(error)) from error

    def _forget_finished(self) -> None:
        calls = self._held.calls
        while calls and calls[0].look() != _PENDING:
            calls.popleft()


def _join(rank: int, size: int, meet: Meet, ring_bytes: int) -> _native.ShmRank:
    """Make the segment or open rank 0's; every rank succeeds or every rank fails."""
    native: _native.ShmRank | None = None
    error, location = "", (0, 0, 0, 0)
    try:
        if rank == 0:
            native = _native.ShmRank.create(size, ring_bytes)
            location = native.location()
    except RuntimeError as failed:
        error = str(failed)
    try:
        found = _meet(meet, size, error, _FIRST.pack(size, ring_bytes, *location), _FIRST)
        for other, (its_size, its_ring_bytes, *_) in enumerate(found):
            if (its_size, its_ring_bytes) != (size, ring_bytes):
                raise PlanMismatchError(
                    f"rank {other} has size={its_size}, ring_bytes={its_ring_bytes}; "
                    f"rank {rank} has size={size}, ring_bytes={ring_bytes}"
                )
        identity = (0, 0)
        try:
            identity = _native.shm_process()
            process, start, descriptor, nonce = found[0][2:]
            native = native or _native.ShmRank.attach(
                (process, start, descriptor, nonce), rank, size, ring_bytes
            )
        except RuntimeError as failed:
            error = f"{failed}; ranks share memory on one host, as one user and in one PID namespace"
        processes = _meet(meet, size, error, _SECOND.pack(*identity), _SECOND)
        assert native is not None
        native.start([(process, start) for process, start in processes])
    except BaseException as failed:
        if native is not None:
            native.close()
        if isinstance(failed, RuntimeError) and not isinstance(failed, GradcompError):
            raise TransportError(str(failed)) from failed
        raise
    return native


def _meet(meet: Meet, size: int, error: str, message: bytes, layout: struct.Struct) -> list[tuple[int, ...]]:
    """Every rank's message, or the error of the first rank that had one, on every rank."""
    replies = meet(b"!" + error.encode() if error else b"=" + message)
    if len(replies) != size:
        raise ConfigError(f"meet gave {len(replies)} replies for {size} ranks")
    for other, reply in enumerate(replies):
        if reply[:1] == b"!":
            raise TransportError(f"rank {other} cannot share memory: {printable(reply[1:])}")
        if reply[:1] != b"=" or len(reply) != 1 + layout.size:
            raise TransportError(f"rank {other} wants to share memory in another way than this rank")
    return [layout.unpack(reply[1:]) for reply in replies]


def local_meet(size: int) -> list[Meet]:
    """One ``meet`` per rank, for ranks that are threads of one process."""
    import threading

    barrier = threading.Barrier(size)
    replies: list[bytes] = [b""] * size

    def of(rank: int) -> Meet:
        def meet(message: bytes) -> list[bytes]:
            barrier.wait()
            replies[rank] = message
            barrier.wait()
            return list(replies)

        return meet

    return [of(rank) for rank in range(size)]
