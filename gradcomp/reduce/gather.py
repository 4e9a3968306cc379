"""The all-to-all broadcast of codes, gather-and-sum to a root, and parameter servers (Markov 2024, section 2.2.1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gradcomp.core.errors import ConfigError
from gradcomp.core.scheme import Scheme
from gradcomp.core.topology import Topology
from gradcomp.kernels.cuda.mirrors import fetch
from gradcomp.kernels.step import StepContext
from gradcomp.reduce.base import (
    HOST_MEMORY,
    Binding,
    Memory,
    Message,
    Move,
    Part,
    Reduction,
    Rounds,
    exchange,
    register,
)
from gradcomp.reduce.chunks import WholeCodes, encode, floats
from gradcomp.reduce.halves import Roles
from gradcomp.reduce.header import BucketFlags, ByteHeader
from gradcomp.reduce.model import Cost, Load, to_owners
from gradcomp.reduce.sra import ScatterReduceAllgather, served
from gradcomp.reduce.varying import fixed
from gradcomp.transport.base import AllGather

ROOT = 0


@register("all_to_all")
class AllToAllBroadcast(Reduction):
    """Every rank sends its whole code to all others; each decodes the N codes and adds them in rank order in float32.

    Each rank computes the mean itself. All use the same order and the same arithmetic, so they get the same bytes. A
    value is encoded once; a rank decodes N payloads.

    Wire: one round; a rank sends d (N-1) bytes for a payload of d bytes, and N-1 headers.
    State: a residual per layer, for groups with feedback, and no server-side error, since no mean is encoded. A rank
    has buffers for N payloads and for the sum in float32.
    Source: Markov 2024, section 2.2.1, "Full mesh", whose d N^2 counts all ranks.
    """

    by_kernels = True

    def __init__(
        self, parts: Sequence[Part], layers: int, rank: int, world: int, memory: Memory = HOST_MEMORY
    ) -> None:
        self._whole = WholeCodes(fixed(parts), layers, world, memory.local)
        codes = self._whole.codes
        self._encode = codes.inputs()
        header = ByteHeader(layers, np.full(world, codes.payload_bytes[0], dtype=np.int64))
        buffers = codes.copies(memory, world)
        self._messages = [Message(buffer, header, r) for r, buffer in enumerate(buffers)]
        self._own = own = self._messages[rank]
        others = [(r, message) for r, message in enumerate(self._messages) if r != rank]
        self._gather = Move(
            AllGather(buffers.reshape(-1), [codes.sizes[0]] * world), [own], others, common=True
        )
        self.rounds = 1 if world > 1 else 0
        self.bytes_sent = (world - 1) * codes.sizes[0]

    @staticmethod
    def cost(load: Load, topology: Topology, scheme: Scheme) -> Cost:
        world = topology.world
        (size,) = load.chunks(1)
        down = to_owners(topology, range(world), dict.fromkeys(range(world), size)).back()
        return Cost([down] if world > 1 else [], 1, 1, world + 1)

    def run(self, context: StepContext, binding: Binding, flags: BucketFlags) -> Rounds:
        yield from encode(self._whole.codes.parts, self._encode, self._own.buffer, context, binding, flags)
        if self.rounds:
            yield self._gather
        yield from self._whole.add(self._messages, context, binding)
        return (yield from self._whole.decode(self._whole.sum, context, binding, flags))


@register("gather")
class GatherAndSum(Reduction):
    """The root decodes all codes, adds them in rank order in float32 and sends the sum to everyone as it is.

    The mean has the same bytes as that of the all-to-all broadcast. A value is encoded once; the root decodes N
    payloads.

    Wire: two rounds. In round 0 every other rank sends its whole code, d bytes, to rank 0. In round 1 rank 0 sends the
    sum, n bytes of float32, to each of them, n (N-1) bytes in all, and every rank divides by N. Each message has a
    header.
    State: a residual per layer, for groups with feedback, and no server-side error, since no mean is encoded. The root
    has buffers for N payloads, and every rank has one for the sum in float32.
    Source: Markov 2024, section 2.2.1. Its full mesh is an all-gather whose result every rank adds. In this form one
    rank adds, as servers do for sparse gradients in other frameworks; see ``docs/decisions/0013``.
    """

    by_kernels = True

    def __init__(
        self, parts: Sequence[Part], layers: int, rank: int, world: int, memory: Memory = HOST_MEMORY
    ) -> None:
        self._rank = rank
        allocate = memory.local if rank == ROOT else memory.messages
        self._whole = WholeCodes(fixed(parts), layers, world, allocate)
        codes, dense = self._whole.codes, self._whole.dense
        self._encode = codes.inputs()
        up = ByteHeader(layers, np.full(world, codes.payload_bytes[0], dtype=np.int64))
        senders = range(world) if rank == ROOT else [rank]
        buffers = codes.copies(memory, len(senders))
        self._codes = [Message(buffer, up, r) for r, buffer in zip(senders, buffers, strict=True)]
        # Kernels add in memory of the device; the sum is copied to a message unless it can be sent from there.
        self._apart = allocate is not memory.messages
        self._sum = dense.message(floats(dense, memory.messages) if self._apart else self._whole.sum, 0)
        self._others = range(1, world)
        self.rounds = 2 if world > 1 else 0
        self.bytes_sent = (world - 1) * dense.sizes[0] if rank == ROOT else codes.sizes[0]

    @staticmethod
    def cost(load: Load, topology: Topology, scheme: Scheme) -> Cost:
        world = topology.world
        (size,) = load.chunks(1)
        up = to_owners(topology, range(world), {ROOT: size})
        down = to_owners(topology, range(world), {ROOT: load.dense_message}).back()
        return Cost([up, down] if world > 1 else [], 1, 1, world + 1)

    def run(self, context: StepContext, binding: Binding, flags: BucketFlags) -> Rounds:
        own = self._codes[0]  # on the root too, since it is rank 0
        yield from encode(self._whole.codes.parts, self._encode, own.buffer, context, binding, flags)
        if self._rank != ROOT:
            yield exchange([(ROOT, own)])
            yield exchange(arrivals=[(ROOT, self._sum)], whole=True)
        else:
            if self.rounds:
                yield exchange(arrivals=[(r, self._codes[r]) for r in self._others])
            yield from self._whole.add(self._codes, context, binding)
            if self._apart:
                with binding.span("reduce"):
                    fetch(self._whole.sum, self._sum.buffer)
            if self.rounds:
                yield exchange([(r, self._sum) for r in self._others], whole=True)
        return (yield from self._whole.decode(self._sum.buffer, context, binding, flags))


@register("parameter_server")
class ParameterServer(ScatterReduceAllgather):
    """The first S ranks serve: each owns one of S chunks, adds all ranks' codes of it and sends its mean to everyone.

    Servers train as well. If all ranks serve, this is scatter-reduce-allgather. For any S the mean has the same bytes
    as there. A value is encoded twice.

    Wire: two rounds. A rank sends its payload of d bytes to the servers, without the chunk that it owns itself. A
    server sends (N-1) d/S bytes back. Each message has a header.
    State: for groups with feedback, a residual per layer and, on servers, the server-side error of the owned ranges.
    Errors: ConfigError for more servers than ranks, or fewer than one.
    Source: Markov 2024, section 2.2.1. Differs: what comes back is the mean gradient, not the model.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        layers: int,
        rank: int,
        world: int,
        servers: int = 1,
        *,
        memory: Memory = HOST_MEMORY,
    ) -> None:
        if not 1 <= servers <= world:
            raise ConfigError(
                f"parameter_server:servers={servers} needs 1 to {world} servers among {world} ranks"
            )
        super().__init__(parts, layers, rank, world, Roles.of(world, servers), memory)

    @staticmethod
    def arguments(scheme: Scheme, topology: Topology, turn: int) -> dict[str, Any]:
        return {"world": topology.world, "servers": _servers(scheme, topology)}

    @staticmethod
    def cost(load: Load, topology: Topology, scheme: Scheme) -> Cost:
        return served(load, topology, _servers(scheme, topology))


def _servers(scheme: Scheme, topology: Topology) -> int:
    """Return the number of servers; 1 in a world of one, so that a setting for larger jobs works there too."""
    return scheme.servers if topology.world > 1 else 1
