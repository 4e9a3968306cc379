"""The two-level transport uses one transport inside each host and another between hosts.

**Messages** of ``alltoallv``, ``allgatherv`` and ``exchange`` go through ``local`` between ranks of one host, and
through ``remote`` between hosts. A rank sends as many bytes as with one transport, but only those for ranks of other
hosts leave its host.

**Allreduce** of d bytes has three phases: ``local`` sums inside every host, ``leaders`` sums over hosts, and ``back``
sends that sum to the ranks of every host, so all ranks have the same bytes. Each of H hosts sends 2 d (H-1)/H bytes to
the others, however many ranks it has.

**ReduceInside** and **BroadcastInside** are collectives of ``local`` with a root, if its engine has them.

A phase starts when a handle is polled. On each transport all ranks must issue the same collectives in the same order,
so the second and the third phase have transports of their own, on which they start in the order of the allreduces.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from gradcomp.core.errors import ConfigError
from gradcomp.core.topology import Topology
from gradcomp.transport.base import (
    Bytes,
    Handle,
    Messages,
    Operation,
    PointToPoint,
    Rooted,
    Start,
    Transport,
    parts_of,
)


@dataclass(eq=False)
class _All:
    """Tracks a collective whose parts run on several transports; it is complete when all of them are."""

    handles: list[Handle]

    def poll(self) -> bool:
        self.handles = [handle for handle in self.handles if not handle.poll()]
        return not self.handles


@dataclass(eq=False)
class _Sum:
    """Tracks an allreduce: ``handle`` is the phase that runs, ``phases`` has those that start after it."""

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
        """Start the phases that can start; none starts before the same phase of ``before``, the earlier allreduce."""
        while not self.done and (self.ready or self.handle.poll()):
            self.ready = True
            if not self.phases:
                self.done = True
            elif before is None or len(before.phases) < len(self.phases):
                self.handle = self.phases.popleft()()
                self.ready = False
            else:
                return


class TwoLevelTransport(PointToPoint):
    """Combines transports inside hosts and between hosts; it owns them and closes them.

    Allreduce adds in rank order inside each host, then in the order in which ``leaders`` adds.

    Args:
        local: A transport among ``topology.members(rank)``, the ranks of this rank's host, in that order.
        remote: A transport among all ranks.
        topology: The ranks, and the hosts that they are on.
        leaders: A transport among ``topology.leaders``; None on all other ranks.
        back: A second transport among the ranks of ``local``.

    Raises:
        ConfigError: A transport does not have the ranks that the topology has.
    """

    def __init__(
        self,
        local: Transport,
        remote: Transport,
        topology: Topology,
        leaders: Transport | None,
        back: Transport,
    ) -> None:
        self.rank, self.size, self.topology = remote.rank, remote.size, topology
        if topology.world != self.size:
            raise ConfigError(
                f"the topology has {topology.world} ranks, but the transport remote has {self.size}"
            )
        self._members = topology.members(self.rank)
        self._place = {rank: place for place, rank in enumerate(self._members)}
        for name, inside in (("local", local), ("back", back)):
            _check(name, inside, self._place[self.rank], len(self._members))
        if (leaders is not None) != (self.rank in topology.leaders):
            raise ConfigError(
                f"rank {self.rank} is {'no' if leaders else 'a'} leader of its host: leaders must be a transport on "
                "leaders and None on all other ranks"
            )
        if leaders is not None:
            _check("leaders", leaders, topology.leaders.index(self.rank), len(topology.leaders))
        self._local, self._remote, self._leaders, self._back = local, remote, leaders, back
        self._transports = [each for each in (local, back, remote, leaders) if each is not None]
        self._consecutive = self._members[-1] - self._members[0] + 1 == len(self._members)
        self.byte_seconds = remote.byte_seconds
        self.reduces_inside = isinstance(local, Rooted)
        self._sums: deque[_Sum] = deque()

    @property
    def bytes_between_hosts(self) -> int:
        """Return the part of ``bytes_sent`` that went to other hosts."""
        return self._remote.bytes_sent + (self._leaders.bytes_sent if self._leaders else 0)

    def allreduce(self, array: npt.NDArray[Any]) -> Handle:
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

    def allgatherv(self, buffer: Bytes, counts: Sequence[int]) -> Handle:
        if not self._consecutive:
            return super().allgatherv(buffer, counts)
        parts = parts_of(buffer, counts)
        start, inside = sum(counts[: self._members[0]]), [counts[rank] for rank in self._members]
        handle = self._local.allgatherv(buffer[start : start + sum(inside)], inside)
        return self._both(handle, self._to_others([parts[self.rank]] * self.size), self._to_others(parts))

    def exchange(self, sends: Messages, recvs: Messages) -> Handle:
        inside = [
            [(self._place[rank], array) for rank, array in each if rank in self._place]
            for each in (sends, recvs)
        ]
        return self._both(self._local.exchange(*inside), sends, recvs)

    def reduce_inside(self, array: npt.NDArray[np.float32], root: int) -> Handle:
        """Sum over the ranks of this host to its rank ``root``, see :class:`gradcomp.transport.base.Rooted`."""
        assert isinstance(self._local, Rooted), "reduces_inside says that it is"
        handle = self._local.reduce(array, self._place[root])
        self._count()
        return handle

    def broadcast_inside(self, buffer: Bytes, root: int) -> Handle:
        """Send from ``root`` to all ranks of its host, see :class:`gradcomp.transport.base.Rooted`."""
        assert isinstance(self._local, Rooted), "reduces_inside says that it is"
        handle = self._local.broadcast(buffer, self._place[root])
        self._count()
        return handle

    def _both(self, inside: Handle, sends: Messages, recvs: Messages) -> Handle:
        handles = [inside]
        if len(self.topology.leaders) > 1:
            outside = [
                [message for message in each if message[0] not in self._place] for each in (sends, recvs)
            ]
            handles.append(self._remote.exchange(*outside))
        self._count()
        return _All(handles)

    def abandon(self) -> None:
        for transport in self._transports:
            transport.abandon()

    def close(self) -> None:
        for transport in self._transports:
            transport.close()

    def _count(self) -> None:
        self.bytes_sent = sum(transport.bytes_sent for transport in self._transports)

    def _advance(self) -> None:
        before: _Sum | None = None
        for one in self._sums:
            one.advance(before)
            before = one
        while self._sums and self._sums[0].done:
            self._sums.popleft()
        self._count()


@dataclass(eq=False)
class ReduceInside(Operation):
    """Requests a :meth:`TwoLevelTransport.reduce_inside`; all ranks of all hosts issue it."""

    array: npt.NDArray[np.float32]
    root: int

    def _prepare(self, transport: Transport) -> Start:
        assert isinstance(transport, TwoLevelTransport), "reduces_inside says that it is"
        return partial(transport.reduce_inside, self.array, self.root)

    def _senders(self, transport: Transport) -> Iterable[int]:
        assert isinstance(transport, TwoLevelTransport), "reduces_inside says that it is"
        return transport.topology.members(self.root) if transport.rank == self.root else ()


@dataclass(eq=False)
class BroadcastInside(Operation):
    """Requests a :meth:`TwoLevelTransport.broadcast_inside`; all ranks of all hosts issue it."""

    buffer: Bytes
    root: int

    def _prepare(self, transport: Transport) -> Start:
        assert isinstance(transport, TwoLevelTransport), "reduces_inside says that it is"
        return partial(transport.broadcast_inside, self.buffer, self.root)

    def _senders(self, transport: Transport) -> Iterable[int]:
        return (self.root,)


def _check(name: str, transport: Transport, rank: int, size: int) -> None:
    if (transport.rank, transport.size) != (rank, size):
        raise ConfigError(
            f"{name} has this rank as {transport.rank} of {transport.size}, the topology as {rank} of {size}"
        )
