"""Gradients are summed exactly inside each host, and compressed between the hosts' leaders (Markov 2024)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gradcomp.core.scheme import Scheme
from gradcomp.core.topology import Topology
from gradcomp.kernels.codec import Group, Sizes, Table
from gradcomp.kernels.cuda.mirrors import address_of
from gradcomp.kernels.segments import FLOAT32
from gradcomp.kernels.step import StepContext
from gradcomp.reduce.base import (
    HOST_MEMORY,
    Addresses,
    Binding,
    Memory,
    Message,
    Move,
    Part,
    Reduction,
    Rounds,
    Waits,
    exchange,
    register,
)
from gradcomp.reduce.chunks import Chunks, Mean, as_float32, encode, floats
from gradcomp.reduce.halves import Roles
from gradcomp.reduce.header import BucketFlags, ByteHeader
from gradcomp.reduce.model import Cost, Load, to, to_owners
from gradcomp.reduce.sra import ScatterReduceAllgather
from gradcomp.reduce.sums import carried, contribute
from gradcomp.transport.base import Bytes, Exchange, Messages, Operation
from gradcomp.transport.two_level import BroadcastInside, ReduceInside


@register("hierarchical")
class Hierarchical(Reduction):
    """Members send exact contributions to their host's leader; leaders exchange codes of the sums and forward them.

    A contribution is c = scale g + decay r. First, members send theirs in float32, and their residuals become 0; the
    leader adds the contributions of its host in rank order. Then the H leaders run scatter-reduce-allgather: each
    encodes its host's sum, and what that loses goes into the leader's residual; the owner of a chunk adds the hosts'
    codes in order, divides by the number of ranks N, adds its server-side error and encodes again. Last, a leader
    forwards the codes that it gathered unchanged, so all ranks decode the same bytes. The ranks of a host lead in turn,
    exchange bucket by exchange bucket, so that they share the work. A value is encoded twice.

    Where the topology has ``reduces_inside``, the engine inside the host adds the contributions to the leader in an
    order of its own, and broadcasts the codes to the members. A member's message to the leader then has a header only.
    Sums of two contributions have the same bits either way, longer ones are equal up to the rounding of float32.

    Wire: 4 rounds; 2 if there is one host, or if every host has one rank, where this is plain
    scatter-reduce-allgather. A member sends n bytes for n bytes of float32. The leader of a host with m ranks sends
    2 d (H-1)/H bytes to other hosts and d (m-1) inside its host, for a payload of d bytes. Each message has a header
    per chunk. An engine that adds and broadcasts sends as many bytes; :meth:`cost` has the times of messages.
    State: for groups with feedback, a residual per layer and, on leaders, the server-side error of the owned chunk.
    Residuals are in the units of a sum over ranks, as in every reduction.
    Source: Markov 2024, sections 2.2.1 and 3.5.2. Differs: without such an engine one rank of a host adds everything.
    """

    sums_travel = True
    by_kernels = True

    def __init__(
        self,
        parts: Sequence[Part],
        layers: int,
        rank: int,
        topology: Topology,
        turn: int = 0,
        memory: Memory = HOST_MEMORY,
    ) -> None:
        self._rank = rank
        members = topology.members(rank)
        self._leaders = leaders = topology.leaders_in_turn(turn)
        self._leader = leaders[topology.hosts[rank]]
        self._others = tuple(member for member in members if member != self._leader)
        self._place = members.index(self._leader)
        self._several = len(leaders) < topology.world  # some host has several ranks
        self._between = 2 if len(leaders) > 1 else 0
        self.rounds = self._between + 2 * self._several

        self._by_engine = self._several and topology.reduces_inside

        self._dense = Chunks(as_float32(parts), layers, 1)
        payload = 0 if self._by_engine else self._dense.payload_bytes[0]
        up = ByteHeader(layers, np.full(topology.world, payload, dtype=np.int64))
        self._inputs = self._dense.inputs()
        self._inner: ScatterReduceAllgather | None = None
        if rank == self._leader:
            self._own = floats(self._dense, memory.messages if self._by_engine else memory.local)
            roles = Roles(leaders, len(leaders), topology.world)
            self._inner = ScatterReduceAllgather(carried(parts), layers, rank, topology.world, roles, memory)
            self.ranges = self._inner.ranges
            self._mean = self._inner.mean
            self.bytes_sent = self._inner.bytes_sent + len(self._others) * len(self._mean.buffer)
        else:
            self._own = floats(self._dense, memory.messages)
            self._mean = Mean(Chunks(carried(parts), layers, len(leaders)), memory)
            self.bytes_sent = self._dense.sizes[0]
        self._received: list[Message] = []
        if self._others and self._inner:
            self._sums = self._dense.place()
            count, size = len(self._others), up.message_bytes[0]
            buffers = memory.messages(
                count * size, [(at * size, at * size + up.nbytes) for at in range(count)]
            )
            self._received = [
                Message(buffer, up, member)
                for member, buffer in zip(self._others, buffers.reshape(count, size), strict=True)
            ]
            self._sum = floats(self._dense, memory.local)
        own = Message(self._own[: up.message_bytes[0]], up, rank)
        self._up = exchange(
            [] if self._inner else [(self._leader, own)],
            [(message.chunk, message) for message in self._received],
        )
        if self._by_engine:
            values = self._own[up.nbytes :].view(np.float32)
            self._up = replace(self._up, values=[ReduceInside(values, self._leader)])

    def assign(self, rows: Sequence[int]) -> None:
        """Set the rows of the server-side error, which only leaders have."""
        if self._inner:
            self._inner.assign(rows)

    @staticmethod
    def arguments(scheme: Scheme, topology: Topology, turn: int) -> dict[str, Any]:
        return {"topology": topology, "turn": turn}

    @staticmethod
    def cost(load: Load, topology: Topology, scheme: Scheme) -> Cost:
        leaders, hosts = topology.leaders, np.asarray(topology.hosts)
        members = np.bincount(hosts)
        sizes = load.chunks(len(leaders))
        between = to_owners(topology, leaders, dict(zip(leaders, sizes.tolist(), strict=True)))
        flows = [between, between.back()] if len(leaders) > 1 else []
        added = 0.0
        if members.max() > 1:
            leader = np.asarray(leaders)[hosts]
            follows = leader != np.arange(topology.world)
            up = to(topology, leader, load.dense_message * follows)
            flows = [up, *flows, to(topology, leader, sizes.sum() * follows).back()]
            added = float(members.max())
        return Cost(flows, 2, 1 + 1 / len(leaders), added + 1 + 1)

    def run(self, context: StepContext, binding: Binding, flags: BucketFlags) -> Rounds:
        if self._inner is None:
            yield from self._follow(context, binding, flags)
        else:
            yield from self._lead(self._inner, context, binding, flags)
        return (yield from self._mean.decode(context, binding, flags))

    def _follow(self, context: StepContext, binding: Binding, flags: BucketFlags) -> Waits[None]:
        yield from encode(self._dense.parts, self._inputs, self._own, context, binding, flags)
        yield self._up
        for _ in range(self._between):
            yield exchange()
        operation = self._down([], [(self._leader, self._mean.buffer)])
        arrivals = list(zip(self._leaders, self._mean.messages, strict=True))
        # The leader forwards what it gathered unchanged, with the headers of the round in which it gathered.
        yield Move(operation, arrivals=arrivals, whole=True, framed_in=2 if self._between else None)

    def _lead(
        self, inner: ScatterReduceAllgather, context: StepContext, binding: Binding, flags: BucketFlags
    ) -> Waits[None]:
        if self._by_engine and self._others:
            yield from encode(self._dense.parts, self._inputs, self._own, context, binding, flags)
        if self._several:
            yield self._up
        if self._others:
            with binding.span("reduce"):
                self._add(context, binding, flags)
            context, binding = replace(context, scale=1.0), _Sums(binding, self._addresses())
        yield from inner.gather_means(context, binding, flags)
        if self._several:
            operation = self._down([(member, self._mean.buffer) for member in self._others], [])
            yield Move(operation, [] if self._between else self._mean.messages, whole=True)

    def _down(self, sends: Messages, recvs: Messages) -> Operation:
        """Return the operation that brings the codes from the leader to the other ranks of the host."""
        if self._by_engine:
            return BroadcastInside(self._mean.buffer, self._leader)
        return Exchange(sends, recvs)

    def _add(self, context: StepContext, binding: Binding, flags: BucketFlags) -> None:
        """Add the contributions of the host's ranks, in rank order, to the sum; an engine has added them to the own."""
        messages = [] if self._by_engine else [message.buffer for message in self._received]
        messages.insert(self._place, self._own)
        for part, mine, sums in zip(self._dense.parts, self._inputs, self._sums, strict=True):
            found = mine.flags()
            if not self._by_engine:
                contribute(part, mine, _at(self._own, mine.table), found, context, binding)
            device = part.group.device
            part.codec.reduce(device, sums.table, messages, self._sum, found, context.draw, 1.0)
            mine.note(found, flags)

    def _addresses(self) -> dict[Group, tuple[Sizes, Addresses]]:
        """Return, by group, its layers and the addresses that their element 0 has in the sum.

        A block of a layer lies at its offset from that address, so all blocks of a layer have the same one.
        """
        found = {}
        for part, sums in zip(self._dense.parts, self._sums, strict=True):
            order = np.argsort(sums.layers)
            bases = _at(self._sum, sums.table) - sums.table["start"].astype(np.uint64) * np.uint64(4)
            found[part.group] = (sums.layers[order], bases[order])
        return found


@dataclass(frozen=True)
class _Sums:
    """Gives a leader its host's sum in place of its gradients; the sum includes the residuals already."""

    binding: Binding
    places: dict[Group, tuple[Sizes, Addresses]]

    def sources(self, table: Table, layers: Sizes, group: Group, offsets: Addresses | None = None) -> None:
        self.binding.sources(table, layers, group, offsets)  # the next residual stays the leader's own
        known, bases = self.places[group]
        at = bases[np.searchsorted(known, layers)]
        table["gradient"] = at + table["start"].astype(np.uint64) * np.uint64(4)
        table["residual"] = 0
        table["dtype"] = FLOAT32

    def owned(self, table: Table, rows: Sizes) -> None:
        self.binding.owned(table, rows)

    def outputs(self, table: Table, layers: Sizes, group: Group, offsets: Addresses | None = None) -> None:
        self.binding.outputs(table, layers, group, offsets)

    def span(self, name: str) -> AbstractContextManager[None]:
        return self.binding.span(name)


def _at(message: Bytes, table: Table) -> Addresses:
    """Return the addresses of the segments' float32 values in a message."""
    return np.uint64(address_of(message)) + table["payload"].astype(np.uint64)
