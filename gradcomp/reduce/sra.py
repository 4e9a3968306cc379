"""Scatter-reduce-allgather (Markov 2024, section 3.5.1): the default reduction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gradcomp import kernels
from gradcomp.core.scheme import Scheme
from gradcomp.core.state import Range
from gradcomp.core.topology import Topology
from gradcomp.kernels.codec import Draw
from gradcomp.kernels.segments import OWNER_RANK
from gradcomp.reduce.base import HOST_MEMORY, Binding, Bytes, Call, Memory, Part, Reduction, Rounds, Waits
from gradcomp.reduce.chunks import Chunks, Mean, encode
from gradcomp.reduce.header import NONFINITE, BucketFlags
from gradcomp.reduce.model import Cost, Load, to_owners
from gradcomp.reduce.registry import register
from gradcomp.transport.base import AllGather, AllToAll, Exchange, Operation


@dataclass(frozen=True)
class Roles:
    """Who takes part in a scatter and a gather.

    ``ranks``: those that have something to add, in the order in which it is added. ``owners``: how many of them, the
    first ones, own a chunk. ``voters[i]``: the number of ranks whose contributions ``ranks[i]`` brings, and whose
    votes. ``first_round``: what the scatter's headers say. ``silent``: how many of the ranks, the first ones, have
    nothing to add after all, and are not waited for in the scatter.
    """

    ranks: Sequence[int]
    owners: int
    voters: Sequence[int]
    first_round: int = 0
    silent: int = 0

    @staticmethod
    def of(world: int, owners: int) -> Roles:
        """Every rank contributes for itself; the first ``owners`` own a chunk each."""
        return Roles(range(world), owners, [1] * world)


@register("sra")
class ScatterReduceAllgather(Reduction):
    """Every rank owns one chunk of the bucket: it adds all ranks' codes of that chunk and sends the mean to everyone.

    Round 0, all-to-all: rank i sends its encoded chunk j to rank j. The owner decodes the N chunks, its own included,
    adds them in rank order in float32, divides by N, adds its second residual and encodes again. Round 1, all-gather:
    everyone decodes the same N chunks, so all ranks get the same bytes.

    Rounds: 2. Bytes per rank: 2 d (N-1)/N for a payload of d bytes (the orders in Markov 2024 count all ranks),
    plus a header per chunk. Encodes on the longest path: 2. Chunks are balanced by payload bytes; their borders fall
    on quantisation buckets, and second-stage draws are the same on every rank, so who owns what changes no bit of the
    mean. State: the second residual of the owned ranges, for groups with feedback.
    Source: Markov 2024, sections 2.2.1 and 3.5.1; Rabenseifner as cited there. Differs: the owner codes its own
    contribution too, and keeps residuals at both encodes.

    With other ``roles`` than everybody's, chunks belong to some of the ranks only, or only some have something to add.
    What an owner counted in the first round then travels in its header of the second one.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        layers: int,
        rank: int,
        world: int,
        roles: Roles | None = None,
        memory: Memory = HOST_MEMORY,
    ) -> None:
        self._parts = parts
        self._roles = roles = roles or Roles.of(world, world)
        self._me = me = roles.ranks.index(rank)
        self._divisor = sum(roles.voters)
        self._relays = roles.owners < world
        self._chunks = chunks = Chunks(parts, layers, roles.owners)
        self._owns = me < roles.owners
        self._adds = me >= roles.silent
        own_bytes = chunks.sizes[me] if self._owns else 0
        others = len(roles.ranks) - 1
        self.rounds = 2 if others else 0
        self.bytes_sent = (sum(chunks.sizes) - own_bytes) * self._adds + others * own_bytes

        # To send: the other owners' chunks in order, then our own, which does not travel.
        order = [j for j in range(roles.owners) if j != me] + [me] * self._owns if self._adds else []
        begins = np.cumsum([0, *(chunks.sizes[j] for j in order)]).tolist()[:-1]
        sent_at = dict(zip(order, begins, strict=True))
        self._send = chunks.messages(memory, [chunks.sizes[j] for j in order])
        heard = others - roles.silent + (not self._adds)
        self._recv = chunks.copies(memory, heard, me) if self._owns else memory.messages(0, [])
        self._sent = {j: self._send[at:] for j, at in sent_at.items()}
        self._heard = list(self._recv)
        self.mean = Mean(chunks, memory)
        self._encode = chunks.inputs([sent_at[j] for j in range(roles.owners)]) if self._adds else []
        self._reduce = chunks.only(me) if self._owns else []
        self.ranges = [
            Range(int(layer), int(row["start"]), int(row["length"]))
            for part, segments in zip(parts, self._reduce, strict=False)
            if part.group.feedback
            for layer, row in zip(segments.layers, segments.table, strict=True)
        ]

    @staticmethod
    def cost(load: Load, topology: Topology, scheme: Scheme) -> Cost:
        """Two rounds among all."""
        return served(load, topology, topology.world)

    def assign(self, rows: Sequence[int]) -> None:
        """Rows of the second residual, in the order of ``ranges``."""
        at = 0
        for part, segments in zip(self._parts, self._reduce, strict=False):
            if part.group.feedback:
                segments.rows = np.array(rows[at : at + len(segments.table)], dtype=np.int64)
                at += len(segments.table)

    def run(self, call: Call, binding: Binding, bucket_flags: BucketFlags) -> Rounds:
        """Two rounds; see the class."""
        yield from self.exchange(call, binding, bucket_flags)
        return (yield from self.mean.decode(call, binding, bucket_flags))

    def exchange(self, call: Call, binding: Binding, bucket_flags: BucketFlags) -> Waits[None]:
        """Both rounds, without the decoding: then ``mean`` and the flags are the same wherever this ran."""
        first = self._roles.first_round
        states = call.states
        if self._adds:
            states = yield from encode(self._parts, self._encode, self._send, call, binding)
        with binding.span("encode"):
            self._chunks.header.identify(call.header_id, first, call.ready)
            for j, message in self._sent.items():
                self._chunks.header.write(message, j, states)
        if self.rounds:
            yield [self._scatter()]

        if self._owns:
            payloads = self._payloads(call, states, bucket_flags)
            yield from self._reduce_own(call, binding, payloads, bucket_flags)
        if self.rounds:
            yield [self._gather()]

        voters = self._divisor if self._relays else 0
        senders = self._roles.ranks[: self._roles.owners]
        own = states if self._relays else None
        ready = self.mean.read(call.header_id, first + 1, senders, voters, bucket_flags, own)
        if self._relays:
            bucket_flags.ready = ready

    def _scatter(self) -> Operation:
        """Chunks to their owners."""
        ranks, sizes = self._roles.ranks, self._chunks.sizes
        others = [rank for i, rank in enumerate(ranks) if i != self._me and i >= self._roles.silent]
        if self._relays:
            sends = [(ranks[j], message[: sizes[j]]) for j, message in self._sent.items() if j != self._me]
            return Exchange(sends, list(zip(others, self._recv, strict=True)) if self._owns else [])
        counts = [0 if j == self._me else size for j, size in enumerate(sizes)]
        own = [0 if j == self._me else sizes[self._me] for j in ranks]
        return AllToAll(self._send, counts, self._recv.reshape(-1), own)

    def _gather(self) -> Operation:
        """The owners' means to everyone."""
        if not self._relays:
            return AllGather(self.mean.buffer, self._chunks.sizes)
        ranks = self._roles.ranks
        others = [rank for i, rank in enumerate(ranks) if i != self._me]
        sends = [(rank, self.mean.chunk(self._me)) for rank in others] if self._owns else []
        recvs = [(ranks[j], self.mean.chunk(j)) for j in range(self._roles.owners) if j != self._me]
        return Exchange(sends, recvs)

    def _payloads(self, call: Call, states: Bytes, bucket_flags: BucketFlags) -> list[Bytes]:
        """All encoded versions of our chunk, in order, after their headers were checked and counted."""
        bucket_flags.states |= states
        bucket_flags.ready = call.ready
        received = iter(self._heard)
        payloads = []
        for i, sender in enumerate(self._roles.ranks):
            if i < self._roles.silent:
                continue
            if i == self._me:
                payloads.append(self._sent[i])
                continue
            chunk = next(received)
            ready, votes = self._chunks.header.read(chunk, self._me, sender, self._roles.voters[i])
            bucket_flags.states |= votes
            bucket_flags.ready += ready
            payloads.append(chunk)
        return payloads

    def _reduce_own(
        self, call: Call, binding: Binding, payloads: list[Bytes], bucket_flags: BucketFlags
    ) -> Waits[None]:
        own = self.mean.chunk(self._me)
        # What is not finite, all ranks must know alike, whoever heard of it.
        states: Bytes = (
            bucket_flags.states.copy() if self._relays else bucket_flags.states & np.uint8(NONFINITE)
        )
        shared = Draw(call.draw.seed, call.draw.step, OWNER_RANK)
        with binding.span("reduce"):
            for part, segments in zip(self._parts, self._reduce, strict=True):
                if part.group.feedback:
                    binding.owned(segments.table, segments.rows)
            flags = [segments.flags() for segments in self._reduce]
            divisor = float(self._divisor)
            tables, routine = [segments.table for segments in self._reduce], self._reduce[0].routine
            with kernels.together(*tables, own, routine=routine) as started:
                for part, segments, found in zip(self._parts, self._reduce, flags, strict=True):
                    decay = part.group.decay_at(call.rate_ratio)
                    part.codec.reduce(
                        segments.table, payloads, own, found, shared, divisor, decay, started.kernels
                    )
        if not started.done():
            yield started
        with binding.span("reduce"):
            started.finish()
            for segments, found in zip(self._reduce, flags, strict=True):
                segments.vote(found, states)
            header = self._chunks.header
            header.identify(
                call.header_id, self._roles.first_round + 1, bucket_flags.ready if self._relays else 0
            )
            header.write(own, self._me, states)


def served(load: Load, topology: Topology, servers: int, silent: int = 0) -> Cost:
    """What it costs if the first ``servers`` ranks own a chunk each, and the first ``silent`` ranks add nothing."""
    world = topology.world
    owned = dict(enumerate(load.chunks(servers).tolist()))
    up = to_owners(topology, range(silent, world), owned)
    down = to_owners(topology, range(world), owned).back()
    flows = [up, down] if world > 1 else []
    return Cost(flows, 2, 1 + 1 / servers, (world - silent) / servers + 1)
