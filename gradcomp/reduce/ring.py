"""Ring allreduce of codes (Markov 2024, section 2.2.1)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gradcomp.core.errors import WireFormatError
from gradcomp.core.scheme import Scheme
from gradcomp.core.topology import Topology
from gradcomp.reduce.base import HOST_MEMORY, Binding, Bytes, Call, Memory, Part, Reduction, Rounds, Waits
from gradcomp.reduce.chunks import Chunks, Mean
from gradcomp.reduce.header import BucketFlags, check_covers
from gradcomp.reduce.model import Cost, Load, to
from gradcomp.reduce.partial import PartialSums, carried
from gradcomp.reduce.registry import register
from gradcomp.transport.base import Exchange


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

    def __init__(
        self, parts: Sequence[Part], layers: int, rank: int, world: int, memory: Memory = HOST_MEMORY
    ) -> None:
        self._rank, self._world = rank, world
        self._chunks = chunks = Chunks(carried(parts), layers, world)
        self._sums = PartialSums(chunks)
        self._mean = Mean(chunks, memory)
        self._send = chunks.messages(memory, [max(chunks.sizes)])
        self._recv = chunks.messages(memory, [max(chunks.sizes)])
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

    def run(self, call: Call, binding: Binding, bucket_flags: BucketFlags) -> Rounds:
        """2 (N-1) rounds; see the class."""
        me, world, header, sizes = self._rank, self._world, self._chunks.header, self._chunks.sizes
        left, right = (me - 1) % world, (me + 1) % world
        last = world - 1
        for t in range(world):
            j = (me - 1 - t) % world
            message = self._mean.chunk(j) if t == last else self._send[: sizes[j]]
            yield from self._add(j, t, message, call, binding)
            if t < last:
                arriving = self._recv[: sizes[(j - 1) % world]]
                yield [Exchange([(right, message)], [(left, arriving)])]

        header.identify(call.header_id, last, 0)
        ready, states = header.read(self._mean.chunk(me), me, me, world)
        bucket_flags.ready = ready
        bucket_flags.states |= states
        for t in range(last):
            message, k = self._mean.chunk((me - t) % world), (me - 1 - t) % world
            yield [Exchange([(right, message)], [(left, self._mean.chunk(k))])]
            header.identify(call.header_id, last + t, ready)
            counted, states = header.read(self._mean.chunk(k), k, left, world)
            check_covers(states, call.states, f"rank {left}")
            if counted != ready:
                raise WireFormatError(
                    f"chunk {k} has {counted} votes for the next plan, chunk {me} has {ready}"
                )
            bucket_flags.states |= states
            header.identify(call.header_id, last + t + 1, ready)
            header.write(self._mean.chunk(k), k, states)  # as it is passed on
        return (yield from self._mean.decode(call, binding, bucket_flags, float(world)))

    def _add(self, j: int, t: int, message: Bytes, call: Call, binding: Binding) -> Waits[None]:
        """Encode chunk j with this rank's contribution and, but for the first one, what arrived in round t - 1."""
        header, ready = self._chunks.header, call.ready
        received: list[Bytes] = []
        votes: Bytes = np.zeros_like(call.states)
        if t:
            arrived = self._recv[: self._chunks.sizes[j]]
            header.identify(call.header_id, t - 1, 0)
            earlier, votes = header.read(arrived, j, (self._rank - 1) % self._world, t)
            ready += earlier
            received = [arrived]
        states = yield from self._sums.encode(j, received, message, call, binding)
        with binding.span("reduce" if received else "encode"):
            header.identify(call.header_id, t, ready)
            header.write(message, j, states | votes)
