"""The binomial tree sends codes of partial sums to a root, and the sum back (Markov 2024)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gradcomp.core.scheme import Scheme
from gradcomp.core.topology import Topology
from gradcomp.kernels.step import StepContext
from gradcomp.reduce.base import HOST_MEMORY, Binding, Memory, Message, Part, Reduction, Rounds, exchange
from gradcomp.reduce.chunks import Chunks, Mean
from gradcomp.reduce.header import BucketFlags, ByteHeader
from gradcomp.reduce.model import Cost, Load, to
from gradcomp.reduce.partial import PartialSums, carried
from gradcomp.reduce.registry import register


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
        self._header = ByteHeader(layers, np.full(world, chunks.payload_bytes[0], dtype=np.int64))
        self._sums = PartialSums(chunks)
        self._mean = Mean(chunks, memory)
        self._levels = (world - 1).bit_length()
        self._children = children(rank, world)
        buffers = chunks.copies(memory, len(self._children))
        self._received = [
            Message(buffer, self._header, child)
            for child, buffer in zip(self._children, buffers, strict=True)
        ]
        self.rounds = 2 * self._levels
        self.bytes_sent = chunks.sizes[0] * (len(self._children) + (rank > 0))

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
        me, arriving = self._rank, dict(zip(self._children, self._received, strict=True))
        received = [message.buffer for message in self._received]
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
