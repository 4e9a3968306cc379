"""Scatter-reduce-allgather (thesis, section 3.5.1): the default reduction."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

import numpy as np

from gradcomp import kernels
from gradcomp.core.state import Range
from gradcomp.kernels.codec import Draw
from gradcomp.kernels.segments import OWNER_RANK
from gradcomp.reduce.base import HOST_MEMORY, Binding, Bytes, Call, Memory, Part, Reduction, Rounds
from gradcomp.reduce.header import NONFINITE, Ballot
from gradcomp.reduce.pieces import Chunks, Mean, encode
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


class ScatterReduceAllgather(Reduction):
    """Every rank owns one chunk of the bucket: it adds all ranks' codes of that chunk and sends the mean to everyone.

    Round 0, all-to-all: rank i sends its encoded chunk j to rank j. The owner decodes the N chunks, its own included,
    adds them in rank order in float32, divides by N, adds its second residual and encodes again. Round 1, all-gather:
    everyone decodes the same N chunks, so all ranks get the same bytes.

    Rounds: 2. Bytes per rank: 2 d (N-1)/N for a payload of d bytes (readings; the thesis's orders are not per rank),
    plus a header per chunk. Encodes on the longest path: 2. Chunks are balanced by payload bytes; their borders fall
    on quantisation buckets, and second-stage draws are the same on every rank, so who owns what changes no bit of the
    mean. State: the second residual of the owned ranges, for groups with feedback.
    Source: thesis, sections 2.2.1 and 3.5.1; Rabenseifner as cited there. Differs: the owner codes its own
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
            for part, pieces in zip(parts, self._reduce, strict=False)
            if part.group.feedback
            for layer, row in zip(pieces.layers, pieces.table, strict=True)
        ]

    def assign(self, rows: Sequence[int]) -> None:
        """Rows of the second residual, in the order of ``ranges``."""
        at = 0
        for part, pieces in zip(self._parts, self._reduce, strict=False):
            if part.group.feedback:
                pieces.rows = np.array(rows[at : at + len(pieces.table)], dtype=np.int64)
                at += len(pieces.table)

    def run(self, call: Call, binding: Binding, ballot: Ballot) -> Rounds:
        """Two rounds; see the class."""
        yield from self.exchange(call, binding, ballot)
        return self.mean.decode(call, binding, ballot)

    def exchange(
        self, call: Call, binding: Binding, ballot: Ballot
    ) -> Generator[list[Operation], None, None]:
        """Both rounds, without the decoding: then ``mean`` and the ballot are the same wherever this ran."""
        first = self._roles.first_round
        with binding.span("encode"):
            states = call.states
            if self._adds:
                states = encode(self._parts, self._encode, self._send, call, binding)
            self._chunks.header.stamp(call.stamp, first, call.ready)
            for j, message in self._sent.items():
                self._chunks.header.write(message, j, states)
        if self.rounds:
            yield [self._scatter()]

        if self._owns:
            payloads = self._payloads(call, states, ballot)
            self._reduce_own(call, binding, payloads, ballot)
        if self.rounds:
            yield [self._gather()]

        voters = self._divisor if self._relays else 0
        senders = self._roles.ranks[: self._roles.owners]
        own = states if self._relays else None
        ready = self.mean.read(call.stamp, first + 1, senders, voters, ballot, own)
        if self._relays:
            ballot.ready = ready

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

    def _payloads(self, call: Call, states: Bytes, ballot: Ballot) -> list[Bytes]:
        """All encoded versions of our chunk, in order, after their headers were checked and counted."""
        ballot.states |= states
        ballot.ready = call.ready
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
            ballot.states |= votes
            ballot.ready += ready
            payloads.append(chunk)
        return payloads

    def _reduce_own(self, call: Call, binding: Binding, payloads: list[Bytes], ballot: Ballot) -> None:
        own = self.mean.chunk(self._me)
        # What is not finite, all ranks must know alike, whoever heard of it.
        states: Bytes = ballot.states.copy() if self._relays else ballot.states & np.uint8(NONFINITE)
        shared = Draw(call.draw.seed, call.draw.step, OWNER_RANK)
        with binding.span("reduce"):
            for part, pieces in zip(self._parts, self._reduce, strict=True):
                if part.group.feedback:
                    binding.owned(pieces.table, pieces.rows)
            flags = [pieces.flags() for pieces in self._reduce]
            divisor = float(self._divisor)
            with kernels.together(*(pieces.table for pieces in self._reduce), own):
                for part, pieces, found in zip(self._parts, self._reduce, flags, strict=True):
                    decay = part.group.decay_at(call.rate_ratio)
                    part.codec.reduce(pieces.table, payloads, own, found, shared, divisor, decay)
            for pieces, found in zip(self._reduce, flags, strict=True):
                pieces.vote(found, states)
            header = self._chunks.header
            header.stamp(call.stamp, self._roles.first_round + 1, ballot.ready if self._relays else 0)
            header.write(own, self._me, states)
