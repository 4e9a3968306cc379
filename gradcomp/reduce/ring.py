"""Ring allreduce of codes (Markov 2024, section 2.2.1)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gradcomp.core.scheme import Scheme
from gradcomp.core.topology import Topology
from gradcomp.kernels.step import StepContext
from gradcomp.reduce.base import HOST_MEMORY, Binding, Memory, Part, Reduction, Rounds, exchange
from gradcomp.reduce.chunks import Chunks, Mean
from gradcomp.reduce.header import BucketFlags
from gradcomp.reduce.model import Cost, Load, to
from gradcomp.reduce.partial import PartialSums, carried
from gradcomp.reduce.registry import register


@register("ring")
class Ring(Reduction):
    """Chunks go around: once while every rank adds to them, once more for everyone to have them.

    In round t of the first N-1, rank p sends chunk p-1-t to rank p+1 (mod N): its own code at first, then the sum of
    what arrived in the round before and its own contribution, encoded again. Chunk p ends at rank p, which adds the
    last contribution and encodes. In N-1 further rounds these codes of the sum go around unchanged, and every rank,
    the last one included, decodes the same N chunks and divides by N.

    Rounds: 2 (N-1). Bytes per rank: 2 d (N-1)/N, plus a header per message. Encodes on the longest path: N. Chunks are
    balanced by payload bytes, with borders on quantisation buckets. A chunk's contributions are added in the order of
    the ring, from the one behind its owner: the sum depends on where chunks are cut. State: what each encode loses
    goes to the rank's first residual (see :class:`PartialSums`); there is no second one.
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
        """2 (N-1) rounds, each to the next rank."""
        world, ranks = topology.world, np.arange(topology.world)
        sizes = load.chunks(world)
        # In round t rank p sends chunk p - 1 - t, and in round t of those that follow chunk p - t.
        firsts = [*(ranks - 1 - t for t in range(world - 1)), *(ranks - t for t in range(world - 1))]
        if (sizes == sizes[0]).all():
            flows = [to(topology, ranks + 1, sizes)] * len(firsts)
        else:
            flows = [to(topology, ranks + 1, sizes[first % world]) for first in firsts]
        return Cost(flows, world, 1, (world - 1) / world + 1)

    def run(self, context: StepContext, binding: Binding, flags: BucketFlags) -> Rounds:
        """2 (N-1) rounds; see the class."""
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
