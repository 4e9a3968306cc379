"""Two transports as one: what stays inside a host goes one way, what leaves it another.

**Messages** (``alltoallv``, ``allgatherv``, ``exchange``) each take the transport that their two ranks share:
``local`` on one host, ``remote`` between hosts. Bytes per rank are those of the plain collective; only the others'
cross the link.

**Allreduce** of d bytes, in three phases: summed inside every host by ``local``, across hosts by ``leaders``, and
sent back inside every host by ``back``. What comes back is the leaders' sum, the same bytes everywhere; each of H
hosts sends 2 d (H-1)/H, however many ranks it has.

The phases start when a handle is polled. So that all ranks issue the same in the same order on each transport, the
later phases have transports of their own, on which they start in the order of the allreduces.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from gradcomp.core.errors import ConfigError
from gradcomp.core.topology import Topology
from gradcomp.transport.base import Bytes, Handle, Messages, Transport, parts_of


@dataclass(eq=False)
class _All:
    """A collective whose parts are under way together."""

    handles: list[Handle]

    def poll(self) -> bool:
        self.handles = [handle for handle in self.handles if not handle.poll()]
        return not self.handles


@dataclass(eq=False)
class _Sum:
    """An allreduce under way. ``phases``: what is still to be started, after what ``handle`` stands for."""

    transport: TwoLevelTransport
    handle: Handle
    phases: deque[Callable[[], Handle]]
    ready: bool = False
    done: bool = False

    def poll(self) -> bool:
        if not self.done:
            self.transport._advance()
        return self.done

    def advance(self, before: _Sum | None) -> None:
        """Start what can be started; no phase before the same one of the allreduce before."""
        while not self.done and (self.ready or self.handle.poll()):
            self.ready = True
            if not self.phases:
                self.done = True
            elif before is None or len(before.phases) < len(self.phases):
                self.handle = self.phases.popleft()()
                self.ready = False
            else:
                return


class TwoLevelTransport(Transport):
    """The ranks of ``remote``, of which those on one host also share ``local`` and ``back``.

    ``local`` and ``back`` are among ``topology.members(rank)``, in that order; ``leaders`` among ``topology.leaders``,
    None on all other ranks. The two-level transport owns them all: it closes them.

    Raises ConfigError where a transport is not among the ranks that the topology says.
    """

    def __init__(
        self,
        local: Transport,
        remote: Transport,
        topology: Topology,
        leaders: Transport | None,
        back: Transport,
    ) -> None:
        self.rank = remote.rank
        self.size = remote.size
        self.bytes_sent = 0
        self.topology = topology
        if topology.world != self.size:
            raise ConfigError(f"the topology is of {topology.world} ranks, remote of {self.size}")
        self._members = topology.members(self.rank)
        place = self._members.index(self.rank)
        for name, inside in (("local", local), ("back", back)):
            _check(name, inside, place, len(self._members))
        if (leaders is not None) != (self.rank in topology.leaders):
            raise ConfigError(f"rank {self.rank} is {'no' if leaders else 'a'} leader of its host")
        if leaders is not None:
            _check("leaders", leaders, topology.leaders.index(self.rank), len(topology.leaders))
        self._local, self._remote, self._leaders, self._back = local, remote, leaders, back
        first, last = self._members[0], self._members[-1]
        self._consecutive = last - first + 1 == len(self._members)
        self._place = {rank: place for place, rank in enumerate(self._members)}
        self._sums: deque[_Sum] = deque()

    @property
    def bytes_between_hosts(self) -> int:
        """The part of ``bytes_sent`` that left the host."""
        return self._remote.bytes_sent + (self._leaders.bytes_sent if self._leaders else 0)

    def allreduce(self, array: npt.NDArray[Any]) -> Handle:
        """See :class:`Transport`; added in rank order inside each host, then as the leaders add."""
        handle = self._local.allreduce(array)
        self._count()
        if len(self.topology.leaders) == 1:
            return handle
        phases = deque[Callable[[], Handle]]()
        if self._leaders is not None:
            phases.append(partial(self._leaders.allreduce, array))
        if len(self._members) > 1:
            counts = [array.nbytes] + [0] * (len(self._members) - 1)
            phases.append(partial(self._back.allgatherv, array.view(np.uint8), counts))
        under_way = _Sum(self, handle, phases)
        self._sums.append(under_way)
        return under_way

    def alltoallv(
        self, send: Bytes, send_counts: Sequence[int], recv: Bytes, recv_counts: Sequence[int]
    ) -> Handle:
        """See :class:`Transport`."""
        sent, received = parts_of(send, send_counts), parts_of(recv, recv_counts)
        received[self.rank][:] = sent[self.rank]
        others = [rank for rank in range(self.size) if rank != self.rank]
        return self.exchange(
            [(rank, sent[rank]) for rank in others if send_counts[rank]],
            [(rank, received[rank]) for rank in others if recv_counts[rank]],
        )

    def allgatherv(self, buffer: Bytes, counts: Sequence[int]) -> Handle:
        """See :class:`Transport`."""
        parts = parts_of(buffer, counts)
        own = parts[self.rank]
        others = [rank for rank in range(self.size) if rank != self.rank]
        sends = [(rank, own) for rank in others if len(own)]
        recvs = [(rank, parts[rank]) for rank in others if counts[rank]]
        if not self._consecutive:
            return self.exchange(sends, recvs)
        start = sum(counts[: self._members[0]])
        inside = [counts[rank] for rank in self._members]
        handle = self._local.allgatherv(buffer[start : start + sum(inside)], inside)
        return self._both(handle, sends, recvs)

    def exchange(self, sends: Messages, recvs: Messages) -> Handle:
        """See :class:`Transport`."""
        return self._both(self._local.exchange(self._inside(sends), self._inside(recvs)), sends, recvs)

    def _both(self, inside: Handle, sends: Messages, recvs: Messages) -> Handle:
        handles = [inside]
        if len(self.topology.leaders) > 1:
            handles.append(self._remote.exchange(self._outside(sends), self._outside(recvs)))
        self._count()
        return _All(handles)

    def abandon(self) -> None:
        """Give up all of them."""
        for transport in self._transports():
            transport.abandon()

    def close(self) -> None:
        """Close all of them."""
        for transport in self._transports():
            transport.close()

    def _transports(self) -> list[Transport]:
        found = [self._local, self._back, self._remote, self._leaders]
        return [transport for transport in found if transport is not None]

    def _count(self) -> None:
        self.bytes_sent = sum(transport.bytes_sent for transport in self._transports())

    def _inside(self, messages: Messages) -> Messages:
        return [(self._place[rank], array) for rank, array in messages if rank in self._place]

    def _outside(self, messages: Messages) -> Messages:
        return [(rank, array) for rank, array in messages if rank not in self._place]

    def _advance(self) -> None:
        before: _Sum | None = None
        for one in self._sums:
            one.advance(before)
            before = one
        while self._sums and self._sums[0].done:
            self._sums.popleft()
        self._count()


def _check(name: str, transport: Transport, rank: int, size: int) -> None:
    if (transport.rank, transport.size) != (rank, size):
        raise ConfigError(
            f"{name} has this rank as {transport.rank} of {transport.size}, the topology as {rank} of {size}"
        )
