"""Reductions in which sums travel: ring and binomial tree (Markov 2024, sections 2.2.1 and 3.5.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from gradcomp.core.errors import ConfigError
from gradcomp.core.scheme import Scheme, names
from gradcomp.core.topology import Topology
from gradcomp.kernels.codec import Codec
from gradcomp.kernels.replayed_calls import DONE
from gradcomp.kernels.segments import BF16, FP32, VOTE
from gradcomp.kernels.step import StepContext
from gradcomp.reduce.base import (
    HOST_MEMORY,
    Addresses,
    Binding,
    Memory,
    Message,
    Part,
    Reduction,
    Rounds,
    Waits,
    class_of,
    device_of,
    exchange,
    register,
)
from gradcomp.reduce.chunks import Chunks, ChunkSegments, Mean, encode, finish
from gradcomp.reduce.header import BucketFlags, ByteHeader
from gradcomp.reduce.model import Cost, Load, to
from gradcomp.reduce.varying import fixed
from gradcomp.transport.base import Bytes


def carried(parts: Sequence[Part]) -> list[Part]:
    """Return the parts with the codecs that encode their partial sums.

    Each has a fixed size. Exact codes of bfloat16 gradients become float32, because bfloat16 cannot hold their sums
    exactly. Raises ConfigError for votes: the majority of a majority and a vote is not that of all votes.
    """
    for part in parts:
        if part.codec.kind == VOTE:
            partial = [name for name in names() if class_of(Scheme(name)).sums_travel]
            others = ", ".join(name for name in names() if name not in partial)
            raise ConfigError(
                f"{part.group.compressor.name} takes a majority over all ranks, which {', '.join(partial)} cannot form "
                f"from partial sums; it works with the reductions {others}"
            )
    return [replace(part, codec=Codec(FP32)) if _is_of_bfloat16(part) else part for part in fixed(parts)]


def _is_of_bfloat16(part: Part) -> bool:
    traits = part.group.compressor.traits
    return part.codec.kind == BF16 and (traits.exact or traits.fakes)


class PartialSums:
    """Encodes partial sums of chunks on this rank.

    c = sum of what arrived + scale g + decay r; message <- encode(c); next residual <- c - decode(message).

    State: what an encode loses is in the units of a sum over ranks and stays in the residual of the rank that encoded:
    sum of contributions = sum of next residuals + decode(last message). So no server-side error is needed. A rank
    encodes every element once in a step, so its random draws are those of the rank.
    """

    def __init__(self, chunks: Chunks) -> None:
        self._parts = chunks.parts
        self._inputs = chunks.inputs()
        self._sums = chunks.place()

    def encode(
        self,
        j: int,
        received: Sequence[Bytes],
        message: Bytes,
        context: StepContext,
        binding: Binding,
        flags: BucketFlags,
    ) -> Waits[None]:
        """Add the codes of chunk j that arrived, in order, then this rank's contribution, and encode the sum.

        Sets the flags of layers in which a value is not finite.
        """
        inputs = [segments.chunk(j) for segments in self._inputs]
        if not received:
            yield from encode(self._parts, inputs, message, context, binding, flags)
            return
        with binding.span("reduce"):
            sums = [segments.chunk(j) for segments in self._sums]
            noted = [mine.flags() for mine in inputs]
            for part, mine, own, found in zip(self._parts, inputs, sums, noted, strict=True):
                lengths = mine.table["length"]
                vector = part.group.scratch.vector("contribution", int(lengths.sum()))
                where = np.uint64(vector.address) + (4 * (np.cumsum(lengths) - lengths)).astype(np.uint64)
                # The kernel encodes sum + residual, so the rank's contribution takes the place of the residual.
                own.table["next_residual"] = contribute(part, mine, where, found, context, binding)
                own.table["residual"] = where
            device = device_of(self._parts)
            with device.kernels.together() as started:
                for part, own, found in zip(self._parts, sums, noted, strict=True):
                    part.codec.reduce(device, own.table, received, message, found, context.draw, 1.0)
        if started is not DONE:
            yield from finish(started, binding, "reduce")
        for mine, found in zip(inputs, noted, strict=True):
            mine.note(found, flags)


def contribute(
    part: Part, mine: ChunkSegments, where: Addresses, found: Bytes, context: StepContext, binding: Binding
) -> Addresses:
    """Write c = scale g + decay r in float32 to the addresses ``where``.

    Returns the addresses of the next residuals, 0 for segments that keep none.
    """
    table, group = mine.table, part.group
    binding.sources(table, mine.layers, group)
    next_residuals = table["next_residual"].copy()
    table["next_residual"] = where
    factors = np.full(len(table), group.scale(context.scale), dtype=np.float32)
    group.device.kernels.contribute(table, found, factors, decay=group.decay_at(context.rate_ratio))
    table["next_residual"] = next_residuals
    return next_residuals


@register("ring")
class Ring(Reduction):
    """Chunks go around the ring twice: first every rank adds its contribution to them, then all ranks receive the sums.

    In round t of the first N-1, rank p sends chunk p-1-t to rank p+1 (mod N): at first the code of its contribution,
    then the code of the sum of what arrived in the round before and its contribution. Chunk p ends at rank p, which
    adds the last contribution and encodes. In N-1 further rounds these codes go around unchanged, and every rank
    decodes the same N chunks and divides by N. A value is encoded up to N times.

    Chunks are balanced by payload bytes, with borders on quantisation buckets. The contributions to a chunk are added
    in the order of the ring, beginning with the rank after its owner, so the sum depends on where chunks are cut.

    Wire: 2 (N-1) rounds; a rank sends 2 d (N-1)/N bytes for a payload of d bytes, and a header per message.
    State: a residual per layer, for groups with feedback, which takes up what each encode on its rank loses (see
    :class:`PartialSums`); no server-side error.
    Source: Markov 2024, sections 2.2.1 and 3.5.1. Differs: chunk p, not p+1, ends at rank p.
    """

    sums_travel = True
    by_kernels = True

    def __init__(
        self, parts: Sequence[Part], layers: int, rank: int, world: int, memory: Memory = HOST_MEMORY
    ) -> None:
        self._rank, self._world = rank, world
        self._chunks = chunks = Chunks(carried(parts), layers, world)
        self._sums = PartialSums(chunks)
        self._mean = Mean(chunks, memory)
        leaving, coming = (chunks.messages(memory, [max(chunks.sizes)]) for _ in range(2))
        self._leaving = [chunks.message(leaving, j) for j in range(world)]
        self._coming = [chunks.message(coming, j) for j in range(world)]
        self.rounds = 2 * (world - 1)
        after = (rank + 1) % world
        self.bytes_sent = 2 * sum(chunks.sizes) - chunks.sizes[rank] - chunks.sizes[after]

    @staticmethod
    def cost(load: Load, topology: Topology, scheme: Scheme) -> Cost:
        world, ranks = topology.world, np.arange(topology.world)
        sizes = load.chunks(world)
        # Rank p sends chunk p - 1 - t in round t of the first N - 1, and chunk p - t in round t of the others.
        firsts = [*(ranks - 1 - t for t in range(world - 1)), *(ranks - t for t in range(world - 1))]
        if (sizes == sizes[0]).all():
            flows = [to(topology, ranks + 1, sizes)] * len(firsts)
        else:
            flows = [to(topology, ranks + 1, sizes[first % world]) for first in firsts]
        return Cost(flows, world, 1, (world - 1) / world + 1)

    def run(self, context: StepContext, binding: Binding, flags: BucketFlags) -> Rounds:
        me, world, means = self._rank, self._world, self._mean.messages
        left, right = (me - 1) % world, (me + 1) % world
        for t in range(world):
            j = (me - 1 - t) % world
            partial = self._leaving[j] if t < world - 1 else means[j]
            received = [self._coming[j].buffer] if t else []
            yield from self._sums.encode(j, received, partial.buffer, context, binding, flags)
            if t < world - 1:
                yield exchange([(right, partial)], [(left, self._coming[j - 1])])
        for t in range(world - 1):
            j = (me - t) % world
            yield exchange([(right, means[j])], [(left, means[j - 1])], whole=True)
        return (yield from self._mean.decode(context, binding, flags, float(world)))


@register("tree")
class Tree(Reduction):
    """Partial sums go up a binomial tree to rank 0; the code of the whole sum comes down again.

    The parent of rank r is r without its lowest set bit 2^k, and r sends to it in round k. Before, r decodes what its
    children sent in earlier rounds, adds that in the order of their ranks, adds its own contribution, and encodes the
    sum once. On the way down messages pass unchanged, so every rank, the root included, decodes the same bytes and
    divides by N. Payloads are not cut, and the order of every sum depends on the number of ranks only. The number of
    encodes on the longest path is 1 + the most set bits of a rank, which is 1 + log2 N for powers of two.

    Wire: 2 ceil(log2 N) rounds, for any N. A rank sends its payload of d bytes, with a header, to each neighbour in
    the tree; the root sends most, d ceil(log2 N) bytes.
    State: a residual per layer, for groups with feedback, which takes up what each encode on its rank loses (see
    :class:`PartialSums`); no server-side error. A rank has buffers for the payloads of all its children and for its
    contribution in float32.
    Source: Markov 2024, sections 2.2.1 and 3.5.1. Differs: the tree is binomial, so a rank's children send one after
    the other, and no round waits for two messages over one link.
    """

    sums_travel = True
    by_kernels = True

    def __init__(
        self, parts: Sequence[Part], layers: int, rank: int, world: int, memory: Memory = HOST_MEMORY
    ) -> None:
        self._rank, self._world = rank, world
        chunks = Chunks(carried(parts), layers, 1)
        self._header = header = ByteHeader(layers, np.full(world, chunks.payload_bytes[0], dtype=np.int64))
        self._sums = PartialSums(chunks)
        self._mean = Mean(chunks, memory)
        self._levels = (world - 1).bit_length()
        below = children(rank, world)
        buffers = chunks.copies(memory, len(below))
        self._received = {
            child: Message(row, header, child) for child, row in zip(below, buffers, strict=True)
        }
        self.rounds = 2 * self._levels
        self.bytes_sent = chunks.sizes[0] * (len(below) + (rank > 0))

    @staticmethod
    def cost(load: Load, topology: Topology, scheme: Scheme) -> Cost:
        world, ranks = topology.world, np.arange(topology.world)
        (nbytes,) = load.chunks(1)
        ups, decoded = [], 1.0
        for level in range((world - 1).bit_length()):
            sends = ranks & -ranks == 1 << level
            ups.append(to(topology, ranks - (1 << level) * sends, nbytes * sends))
            decoded += max(len(children(r, world)) for r in ranks[sends].tolist())
        decoded += len(children(0, world))
        flows = [*ups, *(up.back() for up in reversed(ups))]
        return Cost(flows, 1 + max(r.bit_count() for r in range(world)), len(ups) + 1, decoded)

    def run(self, context: StepContext, binding: Binding, flags: BucketFlags) -> Rounds:
        me, arriving = self._rank, self._received
        received = [message.buffer for message in arriving.values()]
        own = Message(self._mean.buffer, self._header, me)
        for level in range(self._levels):
            child, parent = me + (1 << level), me - (1 << level)
            if child in arriving:
                yield exchange(arrivals=[(child, arriving[child])])
            elif me & -me == 1 << level:
                yield from self._sums.encode(0, received, own.buffer, context, binding, flags)
                yield exchange([(parent, own)])
            else:
                yield exchange()
        if me == 0:
            yield from self._sums.encode(0, received, own.buffer, context, binding, flags)

        for level in reversed(range(self._levels)):
            child, parent = me + (1 << level), me - (1 << level)
            if child in arriving:
                yield exchange([(child, own)], whole=True)
            elif me & -me == 1 << level:
                above = Message(self._mean.buffer, self._header, parent)
                yield exchange(arrivals=[(parent, above)], whole=True)
            else:
                yield exchange()
        return (yield from self._mean.decode(context, binding, flags, float(self._world)))


def children(rank: int, world: int) -> list[int]:
    """Return the children of ``rank`` in the tree, in ascending order."""
    below = rank & -rank or world
    return [rank + (1 << k) for k in range((below - 1).bit_length()) if rank + (1 << k) < world]
