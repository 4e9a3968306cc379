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
    Waits,
    exchange,
)
from gradcomp.reduce.chunks import Chunks, Mean, encode
from gradcomp.reduce.header import BucketFlags
from gradcomp.reduce.model import Cost, Load, to_owners
from gradcomp.reduce.registry import register
from gradcomp.transport.base import AllGather, AllToAll


@dataclass(frozen=True)
class Roles:
    """Who takes part in a scatter and a gather.

    ``ranks``: those that have something to add, in the order in which it is added. ``owners``: how many of them, the
    first ones, own a chunk. ``contributions``: how many those ranks bring together. ``silent``: how many of the ranks,
    the first ones, have nothing to add after all, and are not waited for in the scatter.
    """

    ranks: Sequence[int]
    owners: int
    contributions: int
    silent: int = 0

    @staticmethod
    def of(world: int, owners: int) -> Roles:
        """Every rank contributes for itself; the first ``owners`` own a chunk each."""
        return Roles(range(world), owners, world)


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
        self._parts = parts
        self._roles = roles = roles or Roles.of(world, world)
        self._me = me = roles.ranks.index(rank)
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
        arriving = others - roles.silent + (not self._adds)
        self._recv = chunks.copies(memory, arriving, me) if self._owns else memory.messages(0, [])
        self._sent = {j: chunks.message(self._send[at:], j) for j, at in sent_at.items()}
        self.mean = Mean(chunks, memory)
        heard = [chunks.message(row, me) for row in self._recv]
        # The codes of our chunk, in the order in which they are added.
        self._codes = [message.buffer for message in heard]
        if me in self._sent:
            self._codes.insert(me - roles.silent, self._sent[me].buffer)
        self._scatter, self._gather = self._moves(heard)
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

    def run(self, context: StepContext, binding: Binding, flags: BucketFlags) -> Rounds:
        """Two rounds; see the class."""
        yield from self.reduce_scatter(context, binding, flags)
        yield from self.all_gather()
        return (yield from self.mean.decode(context, binding, flags))

    def reduce_scatter(self, context: StepContext, binding: Binding, flags: BucketFlags) -> Waits[None]:
        """The first round: then every owner has the mean of its chunk, coded, in ``mean``."""
        if self._adds:
            yield from encode(self._parts, self._encode, self._send, context, binding, flags)
        if self.rounds:
            yield self._scatter
        if self._owns:
            yield from self._reduce_own(context, binding, flags)

    def all_gather(self) -> Waits[None]:
        """The second round: then all of ``mean`` and the flags are the same on all ranks."""
        if self.rounds:
            yield self._gather

    def _moves(self, heard: Sequence[Message]) -> tuple[Move, Move]:
        """Chunks to their owners; the owners' means to everyone."""
        roles, me, sizes, means = self._roles, self._me, self._chunks.sizes, self.mean.messages
        senders = [rank for i, rank in enumerate(roles.ranks) if i != me and i >= roles.silent]
        sends = [(roles.ranks[j], message) for j, message in self._sent.items() if j != me]
        arrivals = list(zip(senders, heard, strict=True)) if self._owns else []
        others = [(roles.ranks[j], means[j]) for j in range(roles.owners) if j != me]
        if self._relays:
            own = [(rank, means[me]) for i, rank in enumerate(roles.ranks) if i != me and self._owns]
            return exchange(sends, arrivals), exchange(own, others, whole=True)
        counts = [0 if j == me else size for j, size in enumerate(sizes)]
        coming = [0 if j == me else sizes[me] for j in roles.ranks]
        scatter = AllToAll(self._send, counts, self._recv.reshape(-1), coming)
        gather = AllGather(self.mean.buffer, sizes)
        return (
            Move(scatter, [message for _, message in sends], arrivals),
            Move(gather, [means[me]], others, whole=True),
        )

    def _reduce_own(self, context: StepContext, binding: Binding, flags: BucketFlags) -> Waits[None]:
        own = self.mean.messages[self._me].buffer
        shared = Draw(context.draw.seed, context.draw.step, OWNER_RANK)
        with binding.span("reduce"):
            for part, segments in zip(self._parts, self._reduce, strict=True):
                if part.group.feedback:
                    binding.owned(segments.table, segments.rows)
            noted = [segments.flags() for segments in self._reduce]
            divisor = float(self._roles.contributions)
            tables, routine = [segments.table for segments in self._reduce], self._reduce[0].routine
            with kernels.together(*tables, own, routine=routine) as started:
                for part, segments, found in zip(self._parts, self._reduce, noted, strict=True):
                    decay = part.group.decay_at(context.rate_ratio)
                    part.codec.reduce(
                        segments.table, self._codes, own, found, shared, divisor, decay, started.kernels
                    )
        if not started.done():
            yield started
        with binding.span("reduce"):
            started.finish()
            for segments, found in zip(self._reduce, noted, strict=True):
                segments.note(found, flags)


def served(load: Load, topology: Topology, servers: int, silent: int = 0) -> Cost:
    """What it costs if the first ``servers`` ranks own a chunk each, and the first ``silent`` ranks add nothing."""
    world = topology.world
    owned = dict(enumerate(load.chunks(servers).tolist()))
    up = to_owners(topology, range(silent, world), owned)
    down = to_owners(topology, range(world), owned).back()
    flows = [up, down] if world > 1 else []
    return Cost(flows, 2, 1 + 1 / servers, (world - silent) / servers + 1)
