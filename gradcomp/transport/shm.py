"""The shared-memory transport connects ranks of one host; it is the only engine that gradcomp implements itself.

**Memory.** The ranks of a communicator share one segment: an anonymous file (memfd) that rank 0 makes and the others
open through ``/proc``. So the ranks must be on one host, run as one user, and see the same process numbers (one
container, or containers that share a PID namespace). The segment has no name, so a crashed or killed run leaves nothing
behind, ``/dev/shm`` and a container's limit on it do not matter, and no other user can open it. It is sealed, so no
rank can shorten it while another uses it. All of it is allocated at the start. A lack of memory therefore raises an
error at the start, and never a signal (SIGBUS) later.

The segment holds a ring buffer for every ordered pair of ranks, and for every rank one more that all others read: N x
N ring buffers for N ranks. A ring has 1 MiB if all rings together then take at most 4 MiB, which fits a processor's
cache. With more ranks it is smaller, but at least 64 KiB::

    ranks           2     4    8   16   32    64
    KiB per ring 1024   256   64   64   64    64
    MiB in all      4     4    4   16   64   256

``ring_bytes`` sets another size, a power of two.

**Progress.** One native thread per transport moves the bytes, so calls return at once and computation goes on. The
thread sleeps on a futex in the segment, which other ranks wake. While it waits for another rank, it checks every 0.1 s
that the ranks are alive. It copies to and from the rings in blocks of 64 KiB, which stay in the processor's cache
between writer and reader. The calling thread also moves up to 4 KiB through each ring, in the call and in each poll of
a pending collective. If all processors are busy, small messages would otherwise wait until the native thread runs.

**Collectives.** Point-to-point messages go through the ring of their pair, all-gathered parts once through the ring
that all ranks read. ``allreduce`` cuts the array into one chunk per rank. The owner of a chunk adds the parts
of all ranks in rank order, block by block, and sends every block to all ranks, so the sum has the same bytes on all.

**Failure.** If a rank ends for any reason, or closes while another rank needs it, every waiting rank raises, within
0.2 s, a TransportError that names it. Numbers that other processes wrote to the segment (positions,
and messages' lengths and collectives) are checked; an impossible one raises a TransportError too.
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
from gradcomp.core.strings import printable
from gradcomp.transport.base import Bytes, Done, Handle, Messages, Transport

#: A collective, blocking function of this rank's bytes that returns those of every rank, in rank order.
Meet = Callable[[bytes], list[bytes]]

LARGEST_RING_BYTES = 1 << 20
SMALLEST_RING_BYTES = 1 << 16
#: The most bytes of all rings together, unless every ring has the smallest size already.
RINGS_BYTES = 1 << 22

# The settings and the location of rank 0's segment: process ID, start time of the process, file descriptor, nonce.
_FIRST = struct.Struct("<QQqQqQ")
# A rank's process ID and the start time of the process.
_SECOND = struct.Struct("<qQ")
_PENDING, _DONE, _FAILED = 0, 1, 2


def ring_bytes_for(size: int) -> int:
    """Return the default length in bytes of a ring among ``size`` ranks."""
    ring_bytes = LARGEST_RING_BYTES
    while ring_bytes > SMALLEST_RING_BYTES and size * size * ring_bytes > RINGS_BYTES:
        ring_bytes //= 2
    return ring_bytes


@dataclass(eq=False)
class _Call:
    """Holds a collective and the arrays that the thread uses, and releases both when the collective ends."""

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
    """Holds this rank's native object, and the collectives whose arrays its thread may still read and write.

    :meth:`close` releases all native objects, so none of them is alive when the interpreter ends, even if something
    still refers to the transport or a handle: the hooks of a global optimizer, for example, are never freed.
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
        except RuntimeError as error:  # raised in a forked child, which has nothing to close
            self.failure = str(error)
        self.native = None
        for call in list(self.calls):  # a copy, because another thread may be adding a call, which fails
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
    """Runs collectives among ``size`` ranks on one host through shared memory; allreduce adds in rank order.

    A forked child cannot use the transport.

    Args:
        rank: This rank.
        size: The number of ranks.
        meet: A function that all-gathers bytes among these ranks; the constructor calls it twice.
        ring_bytes: The length of a ring; by default that of :func:`ring_bytes_for`.

    Raises:
        ConfigError: ``rank`` is not below ``size``, ``ring_bytes`` is no power of two from 4096 to 2^30, or ``meet``
            does not return one reply per rank.
        PlanMismatchError: The ranks have different settings.
        TransportError: A rank cannot make, open or map the segment. All ranks raise it.
    """

    def __init__(self, rank: int, size: int, meet: Meet, ring_bytes: int | None = None) -> None:
        if not 0 <= rank < size:
            raise ConfigError(f"rank {rank} is not in 0..{size - 1}, the ranks that share memory")
        self.rank, self.size = rank, size
        self.ring_bytes = ring_bytes_for(size) if ring_bytes is None else ring_bytes
        if self.ring_bytes & (self.ring_bytes - 1) or not 4096 <= self.ring_bytes <= 1 << 30:
            raise ConfigError(f"ring_bytes={ring_bytes} must be a power of two from 4096 to 2^30")
        # This keeps the arrays that the thread reads and writes alive, even if a caller drops its handles.
        self._held = _Held(_join(rank, size, meet, self.ring_bytes) if size > 1 else None)
        self._close = weakref.finalize(self, self._held.close)

    def allreduce(self, array: npt.NDArray[Any]) -> Handle:
        return self._issue("allreduce", 2 * array.nbytes * (self.size - 1) // self.size, array)

    def alltoallv(
        self, send: Bytes, send_counts: Sequence[int], recv: Bytes, recv_counts: Sequence[int]
    ) -> Handle:
        if self.size == 1:
            recv[: recv_counts[0]] = send[: send_counts[0]]
        sent = sum(send_counts) - send_counts[self.rank]
        return self._issue("alltoallv", sent, send, send_counts, recv, recv_counts)

    def allgatherv(self, buffer: Bytes, counts: Sequence[int]) -> Handle:
        return self._issue("allgatherv", (self.size - 1) * counts[self.rank], buffer, counts)

    def exchange(self, sends: Messages, recvs: Messages) -> Handle:
        to, sent = [rank for rank, _ in sends], [array for _, array in sends]
        sources, targets = [rank for rank, _ in recvs], [array for _, array in recvs]
        return self._issue("exchange", sum(map(len, sent)), to, sent, sources, targets)

    @property
    def failure(self) -> str:
        """Return the reason why the transport cannot be used any more; empty while it can."""
        native = self._held.native
        return self._held.failure if native is None else native.failure()

    def abandon(self) -> None:
        """Fail all collectives that are not complete, on this rank and on the others."""
        native = self._held.native
        if native is not None:
            native.abandon()

    def close(self) -> None:
        """Leave the segment; a rank that still needs this one fails."""
        self._close()

    def _issue(self, name: str, sent_bytes: int, *arguments: Any) -> Handle:
        if self.size == 1:
            return Done()
        self.bytes_sent += sent_bytes
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
    """Create the segment on rank 0 and open it on the others; either all ranks succeed or all fail."""
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
            error = (
                f"{failed}; ranks that share memory must be on one host, of one user and in one PID namespace"
            )
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
    """Return every rank's message; if some rank has an error, raise the first one on every rank."""
    replies = meet(b"!" + error.encode() if error else b"=" + message)
    if len(replies) != size:
        raise ConfigError(f"meet gave {len(replies)} replies for {size} ranks")
    for other, reply in enumerate(replies):
        if reply[:1] == b"!":
            raise TransportError(f"rank {other} cannot share memory: {printable(reply[1:])}")
        if reply[:1] != b"=" or len(reply) != 1 + layout.size:
            raise TransportError(
                f"rank {other} does not share memory as this rank does ({len(reply)} bytes came): all ranks need the "
                "same version of gradcomp"
            )
    return [layout.unpack(reply[1:]) for reply in replies]
