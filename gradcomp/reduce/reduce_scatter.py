"""Reduce-scatter: every rank gets the mean of the chunk that it owns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from gradcomp import kernels
from gradcomp.core.state import Range
from gradcomp.kernels.codec import Draw
from gradcomp.kernels.segments import OWNER_RANK
from gradcomp.kernels.step import StepContext
from gradcomp.reduce.base import (
    HOST_MEMORY,
    Binding,
    Bytes,
    Memory,
    Message,
    Move,
    Part,
    Rounds,
    Waits,
    device_of,
    exchange,
)
from gradcomp.reduce.chunks import Chunks, encode
from gradcomp.reduce.header import BucketFlags
from gradcomp.reduce.whole import WholeCodes
from gradcomp.transport.base import AllToAll


@dataclass(frozen=True)
class Roles:
    """Who takes part in a reduce-scatter and an all-gather.

    ``ranks``: those that have something to add, in the order in which it is added. ``owners``: how many of them, the
    first ones, own a chunk. ``contributions``: how many those ranks bring together.
    """

    ranks: Sequence[int]
    owners: int
    contributions: int

    @staticmethod
    def of(world: int, owners: int) -> Roles:
        """Every rank contributes for itself; the first ``owners`` own a chunk each."""
        return Roles(range(world), owners, world)


class ReduceScatter:
    """Rank i sends its encoded chunk j to the owner of j, who adds the codes of all ranks in order and divides by N.

    The mean has two forms. :meth:`run` writes it to the outputs as numbers: m = (sum of decode(code)) / N, in float32,
    then in the layer's dtype. :meth:`encode_mean` writes it as a code, for an all-gather that follows.

    Rounds: 1. Bytes per rank: d (N-1)/N for a payload of d bytes, plus a header per chunk. Encodes on the longest path:
    1, or 2 with :meth:`encode_mean`. State: the first residual, for groups with feedback; with :meth:`encode_mean` also
    the second residual of the owned ranges. Numbers are not encoded again, so they have no second residual.
    Every owner hears of every rank's flags. A sum that overflows is known to its owner only.
    Source: Markov 2024, section 3.5.1; the first half of Rabenseifner's allreduce.
    """

    def __init__(
        self, chunks: Chunks, rank: int, world: int, roles: Roles | None = None, memory: Memory = HOST_MEMORY
    ) -> None:
        self._roles = roles = roles or Roles.of(world, world)
        self._chunks, self._world, self._memory = chunks, world, memory
        self.place = me = roles.ranks.index(rank)
        #: Whether this rank owns a chunk.
        self.owns = me < roles.owners
        own_bytes = chunks.sizes[me] if self.owns else 0
        others = len(roles.ranks) - 1
        self.rounds = 1 if others else 0
        self.bytes_sent = sum(chunks.sizes) - own_bytes

        # To send: the other owners' chunks in order, then our own, which does not travel.
        order = [j for j in range(roles.owners) if j != me] + [me] * self.owns
        begins = np.cumsum([0, *(chunks.sizes[j] for j in order)]).tolist()[:-1]
        sent_at = dict(zip(order, begins, strict=True))
        self._send = chunks.messages(memory, [chunks.sizes[j] for j in order])
        self._recv = chunks.copies(memory, others, me) if self.owns else memory.messages(0, [])
        #: What this rank has for each owner, itself included.
        self.sent = {j: chunks.message(self._send[at:], j) for j, at in sent_at.items()}
        heard = [chunks.message(row, me) for row in self._recv]
        # The codes of our chunk, in the order in which they are added.
        self._codes = list(heard)
        if me in self.sent:
            self._codes.insert(me, self.sent[me])
        self._payloads = [message.buffer for message in self._codes]
        #: The round.
        self.move = self._prepared(heard)
        self._encode = chunks.inputs([sent_at[j] for j in range(roles.owners)])
        self._own = chunks.only(me) if self.owns else []

    @property
    def ranges(self) -> list[Range]:
        """What :meth:`encode_mean` codes under feedback."""
        return [
            Range(int(layer), int(row["start"]), int(row["length"]))
            for part, segments in zip(self._chunks.parts, self._own, strict=False)
            if part.group.feedback
            for layer, row in zip(segments.layers, segments.table, strict=True)
        ]

    def assign(self, rows: Sequence[int]) -> None:
        """Rows of the second residual, in the order of ``ranges``."""
        at = 0
        for part, segments in zip(self._chunks.parts, self._own, strict=False):
            if part.group.feedback:
                segments.rows = np.array(rows[at : at + len(segments.table)], dtype=np.int64)
                at += len(segments.table)

    def run(self, context: StepContext, binding: Binding, flags: BucketFlags) -> Rounds:
        """One round; then the owned chunk's mean is in the outputs. Every rank owns a chunk and adds to all."""
        yield from self.scatter(context, binding, flags)
        yield from self._sum.add(self._codes, context, binding)
        return (yield from self._sum.decode(self._sum.sum, context, binding, flags))

    def scatter(self, context: StepContext, binding: Binding, flags: BucketFlags) -> Waits[None]:
        """The round: then every owner has all codes of its chunk."""
        yield from self.encode(context, binding, flags)
        if self.rounds:
            yield self.move

    def encode(self, context: StepContext, binding: Binding, flags: BucketFlags) -> Waits[None]:
        """All chunks of what this rank adds, to ``sent``."""
        yield from encode(self._chunks.parts, self._encode, self._send, context, binding, flags)

    def code_of(self, place: int) -> Bytes:
        """Room for the own chunk's code from the rank at this place."""
        return self._codes[place].buffer

    def encode_mean(
        self, target: Bytes, context: StepContext, binding: Binding, flags: BucketFlags
    ) -> Waits[None]:
        """On owners, behind the round: c = sum / N + decay r; target <- encode(c); next residual <- c - decode(target).

        r is the second residual. Draws are the same on every rank, so who owns what changes no bit.
        """
        shared = Draw(context.draw.seed, context.draw.step, OWNER_RANK)
        device = device_of(self._chunks.parts)
        with binding.span("reduce"):
            for part, segments in zip(self._chunks.parts, self._own, strict=True):
                if part.group.feedback:
                    binding.owned(segments.table, segments.rows)
            noted = [segments.flags() for segments in self._own]
            divisor = float(self._roles.contributions)
            with kernels.together(device, self._own[0].routine) as started:
                for part, segments, found in zip(self._chunks.parts, self._own, noted, strict=True):
                    decay = part.group.decay_at(context.rate_ratio)
                    part.codec.reduce(
                        segments.table, self._payloads, target, found, shared, divisor, decay, device.kernels
                    )
        if not started.done():
            yield started
        with binding.span("reduce"):
            started.finish()
            for segments, found in zip(self._own, noted, strict=True):
                segments.note(found, flags)

    @cached_property
    def _sum(self) -> WholeCodes:
        """Adds the codes of the own chunk to numbers."""
        parts = [
            Part(part.codec, replace(part.group, table=own.table, layers=own.layers), own.header_index)
            for part, own in zip(self._chunks.parts, self._own, strict=True)
        ]
        return WholeCodes(parts, self._chunks.layers, self._roles.contributions, self._memory.local)

    def _prepared(self, heard: Sequence[Message]) -> Move:
        """Chunks to their owners."""
        roles, me, sizes = self._roles, self.place, self._chunks.sizes
        senders = [rank for i, rank in enumerate(roles.ranks) if i != me]
        sends = [(roles.ranks[j], message) for j, message in self.sent.items() if j != me]
        arrivals = list(zip(senders, heard, strict=True)) if self.owns else []
        if roles.owners < self._world:
            return exchange(sends, arrivals)
        counts = [0 if j == me else size for j, size in enumerate(sizes)]
        coming = [0 if j == me else sizes[me] for j in roles.ranks]
        scatter = AllToAll(self._send, counts, self._recv.reshape(-1), coming)
        return Move(scatter, [message for _, message in sends], arrivals)
