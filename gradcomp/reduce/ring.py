"""The ring allreduce sends codes of partial sums from rank to rank (Markov 2024, section 2.2.1)."""

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
