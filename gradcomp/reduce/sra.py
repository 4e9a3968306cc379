"""Scatter-reduce-allgather (Markov 2024, section 3.5.1) is the default reduction."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gradcomp.core.scheme import Scheme
from gradcomp.core.topology import Topology
from gradcomp.kernels.step import StepContext
from gradcomp.reduce.base import HOST_MEMORY, Binding, Memory, Part, Reduction, Rounds, Waits, register
from gradcomp.reduce.chunks import Chunks, Mean
from gradcomp.reduce.halves import AllGather, ReduceScatter, Roles
from gradcomp.reduce.header import BucketFlags
from gradcomp.reduce.model import Cost, Load, to_owners
from gradcomp.reduce.varying import Compact, VaryingGather, VaryingScatter, varies


@register("sra")
class ScatterReduceAllgather(Reduction):
    """Runs a :class:`ReduceScatter` of chunks of equal bytes, and an :class:`AllGather` of the encoded means.

    In round 0, an all-to-all, rank i sends its encoded chunk j to rank j. The owner decodes the N chunks, its own
    included, adds them in rank order in float32, divides by N, adds its server-side error and encodes again. In round
    1, an all-gather, every rank decodes the same N chunks, so all ranks get the same bytes. A value is encoded twice.

    Chunks are balanced by payload bytes, and their borders are borders of quantisation buckets. The draws of the
    second encode do not depend on the rank. So the mean does not depend on which rank owns a chunk.

    With ``roles``, only some of the ranks own chunks, or only some contribute.

    Wire: two rounds; a rank sends 2 d (N-1)/N bytes for a payload of d bytes, and a header per chunk. (The orders in
    Markov 2024 count all ranks.) If a codec's sizes depend on data (bits by bucket), they travel in front of the
    payloads, and a round takes two where a size has grown; see :mod:`gradcomp.reduce.varying`. Chunks are then
    balanced by their largest sizes, and the mean depends on their borders.
    State: for groups with feedback, a residual per layer and the server-side error of the owned ranges.
    Source: Markov 2024, sections 2.2.1 and 3.5.1; Rabenseifner as cited there. Differs: the owner encodes its own
    contribution too, and both encodes have error feedback.
    """

    by_kernels = True

    def __init__(
        self,
        parts: Sequence[Part],
        layers: int,
        rank: int,
        world: int,
        roles: Roles | None = None,
        memory: Memory = HOST_MEMORY,
    ) -> None:
        roles = roles or Roles.of(world, world)
        varying = varies(parts)
        if varying:
            # This thread copies what travels out of the messages, so they must be in host memory.
            memory, self.by_kernels = HOST_MEMORY, False
        chunks = Chunks(parts, layers, roles.owners)
        self._first = ReduceScatter(chunks, rank, world, roles, memory)
        self._second = AllGather(chunks, rank, world, roles, memory)
        self.rounds = self._first.rounds + self._second.rounds
        self.bytes_sent = self._first.bytes_sent + self._second.bytes_sent
        self.ranges = self._first.ranges
        self._varying = _Varying(chunks, layers, roles, world, self._first, self._second) if varying else None

    @property
    def mean(self) -> Mean:
        """Return the encoded means of all chunks; they are complete after both rounds."""
        return self._second.gathered

    @staticmethod
    def cost(load: Load, topology: Topology, scheme: Scheme) -> Cost:
        return served(load, topology, topology.world)

    def assign(self, rows: Sequence[int]) -> None:
        """Set the rows of the server-side error, in the order of ``ranges``."""
        self._first.assign(rows)

    def run(self, context: StepContext, binding: Binding, flags: BucketFlags) -> Rounds:
        yield from self.gather_means(context, binding, flags)
        return (yield from self.mean.decode(context, binding, flags))

    def gather_means(self, context: StepContext, binding: Binding, flags: BucketFlags) -> Waits[None]:
        """Run both rounds: afterwards ``mean`` and the flags are the same on all ranks."""
        if self._varying is not None:
            self.bytes_sent = yield from self._varying.run(context, binding, flags)
            return
        yield from self._first.scatter(context, binding, flags)
        if self._first.owns:
            yield from self._first.encode_mean(self._second.own, context, binding, flags)
        yield from self._second.gather()


class _Varying:
    """Runs both rounds for chunks whose sizes depend on data; each may take two rounds of messages."""

    def __init__(
        self, chunks: Chunks, layers: int, roles: Roles, world: int, first: ReduceScatter, second: AllGather
    ) -> None:
        self._first, self._second, self._roles = first, second, roles
        self._compact = Compact(chunks)
        self._scatter = VaryingScatter(layers, roles, world, first.place, chunks.payload_bytes)
        self._gather = VaryingGather(layers, roles, world, first.place, chunks.payload_bytes)
        self._alone = world == 1

    def run(self, context: StepContext, binding: Binding, flags: BucketFlags) -> Waits[int]:
        """Run the rounds: afterwards the messages of the :class:`AllGather` hold the encoded means of all chunks.

        Returns the bytes that this rank sent, headers included.
        """
        first, second, me, ranks = self._first, self._second, self._first.place, self._roles.ranks
        yield from first.encode(context, binding, flags)
        if not self._alone:
            with binding.span("compress"):
                nothing = np.zeros(0, dtype=np.uint8)  # this rank's own chunk does not travel
                own = {
                    j: nothing if j == me else self._compact.compact(message.buffer, j)
                    for j, message in first.sent.items()
                }
            heard = yield from self._scatter.run(own)
            with binding.span("decompress"):
                for i, payload in heard.items():
                    self._compact.restore(payload, first.codes[i], me, ranks[i])
        if first.owns:
            yield from first.encode_mean(second.own, context, binding, flags)
        if self._alone:
            return 0
        with binding.span("compress"):
            mine = self._compact.compact(second.own, me) if first.owns else None
        means = yield from self._gather.run(mine)
        with binding.span("decompress"):
            for j, payload in means.items():
                self._compact.restore(payload, second.gathered.messages[j].buffer, j, ranks[j])
        return self._scatter.bytes_sent + self._gather.bytes_sent


def served(load: Load, topology: Topology, servers: int) -> Cost:
    """Return the cost of two rounds in which the first ``servers`` ranks own a chunk each."""
    world = topology.world
    up = to_owners(topology, range(world), dict(enumerate(load.chunks(servers).tolist())))
    return Cost([up, up.back()] if world > 1 else [], 2, 1 + 1 / servers, world / servers + 1)
