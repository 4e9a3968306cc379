"""Reduce-scatter and all-gather: the two halves of an allreduce, by owners of chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from gradcomp.core.state import Range
from gradcomp.kernels.replayed_calls import DONE
from gradcomp.kernels.step import StepContext
from gradcomp.reduce.base import HOST_MEMORY, Binding, Memory, Move, Part, Rounds, Waits, exchange
from gradcomp.reduce.chunks import Chunks, ChunkSegments, Mean, WholeCodes, encode, finish
from gradcomp.reduce.header import BucketFlags
from gradcomp.transport import base as transport
from gradcomp.transport.base import AllToAll, Bytes


@dataclass(frozen=True)
class Roles:
    """Lists the ranks that take part in a reduce-scatter and an all-gather.

    ``ranks`` are those that contribute, in the order in which their contributions are added. The first ``owners`` of
    them own a chunk each. ``contributions`` is the number that the sum is divided by: a leader contributes its host's
    sum, which counts once per rank of the host.
    """

    ranks: Sequence[int]
    owners: int
    contributions: int

    @staticmethod
    def of(world: int, owners: int) -> Roles:
        """Return the roles in which every rank contributes for itself and the first ``owners`` own a chunk each."""
        return Roles(range(world), owners, world)


class ReduceScatter:
    """Rank i sends its encoded chunk j to the owner of j, who adds the codes of all ranks in order and divides by N.

    The mean has two forms. :meth:`run` writes its values to the outputs: m = (sum of decode(code)) / N, in float32,
    then in the layer's dtype. :meth:`encode_mean` writes its code, for an all-gather that follows. Every owner gets
    every rank's flags; only the owner sees that a sum overflows.

    Wire: one round; a rank sends d (N-1)/N bytes for a payload of d bytes, and a header per chunk.
    State: a residual per layer, for groups with feedback; with :meth:`encode_mean`, which encodes a second time, also
    the server-side error of the owned ranges.
    Source: Markov 2024, section 3.5.1; the first half of Rabenseifner's allreduce.
    """

    def __init__(
        self, chunks: Chunks, rank: int, world: int, roles: Roles | None = None, memory: Memory = HOST_MEMORY
    ) -> None:
        self._roles = roles = roles or Roles.of(world, world)
        self._chunks, self._memory = chunks, memory
        self.place = me = roles.ranks.index(rank)
        #: True if this rank owns a chunk.
        self.owns = me < roles.owners
        own_bytes = chunks.sizes[me] if self.owns else 0
        others = len(roles.ranks) - 1
        self.rounds = 1 if others else 0
        self.bytes_sent = sum(chunks.sizes) - own_bytes

        # The buffer has the other owners' chunks in order, then this rank's own chunk, which does not travel.
        order = [j for j in range(roles.owners) if j != me] + [me] * self.owns
        begins = np.cumsum([0, *(chunks.sizes[j] for j in order)]).tolist()[:-1]
        sent_at = dict(zip(order, begins, strict=True))
        self._send = chunks.messages(memory, [chunks.sizes[j] for j in order])
        self._recv = chunks.copies(memory, others, me) if self.owns else memory.messages(0, [])
        #: This rank's message for each owner, itself included.
        self.sent = {j: chunks.message(self._send[at:], j) for j, at in sent_at.items()}
        heard = [chunks.message(row, me) for row in self._recv]
        # The codes of this rank's chunk, in the order in which they are added.
        self._codes = [*heard[:me], self.sent[me], *heard[me:]] if self.owns else []
        #: Their buffers, by the places of their senders among ``roles.ranks``.
        self.codes = [message.buffer for message in self._codes]
        self._encode = chunks.inputs([sent_at[j] for j in range(roles.owners)])
        self._own = chunks.only(me) if self.owns else []

        sends = [(roles.ranks[j], message) for j, message in self.sent.items() if j != me]
        senders = [r for r in roles.ranks if r != rank] if self.owns else []
        arrivals = list(zip(senders, heard, strict=True))
        if roles.owners < world:
            self.move = exchange(sends, arrivals)
        else:
            counts = [0 if j == me else size for j, size in enumerate(chunks.sizes)]
            coming = [0 if j == me else chunks.sizes[me] for j in roles.ranks]
            scatter = AllToAll(self._send, counts, self._recv.reshape(-1), coming)
            self.move = Move(scatter, [message for _, message in sends], arrivals)
        #: The rounds of :meth:`run`.
        self.moves = [self.move] * self.rounds

    @property
    def sent_to(self) -> list[int]:
        """Return the bytes that one run sends to each rank; every rank must own a chunk."""
        return [0 if j == self.place else size for j, size in enumerate(self._chunks.sizes)]

    @property
    def ranges(self) -> list[Range]:
        """Return the parts of layers that :meth:`encode_mean` encodes with error feedback."""
        return [
            Range(int(layer), int(row["start"]), int(row["length"]))
            for part, segments in zip(self._chunks.parts, self._own, strict=False)
            if part.group.feedback
            for layer, row in zip(segments.layers, segments.table, strict=True)
        ]

    def assign(self, rows: Sequence[int]) -> None:
        """Set the rows of the server-side error, in the order of ``ranges``."""
        at = 0
        for part, segments in zip(self._chunks.parts, self._own, strict=False):
            if part.group.feedback:
                segments.rows = np.array(rows[at : at + len(segments.table)], dtype=np.int64)
                at += len(segments.table)

    def run(self, context: StepContext, binding: Binding, flags: BucketFlags) -> Rounds:
        """Write the mean of this rank's chunk to the outputs; every rank must own a chunk and contribute to all."""
        yield from self.scatter(context, binding, flags)
        yield from self._sum.add(self._codes, context, binding)
        return (yield from self._sum.decode(self._sum.sum, context, binding, flags))

    def scatter(self, context: StepContext, binding: Binding, flags: BucketFlags) -> Waits[None]:
        """Encode and exchange: afterwards every owner has all codes of its chunk."""
        yield from self.encode(context, binding, flags)
        if self.rounds:
            yield self.move

    def encode(self, context: StepContext, binding: Binding, flags: BucketFlags) -> Waits[None]:
        """Encode all chunks of this rank's contribution to the messages of ``sent``."""
        yield from encode(self._chunks.parts, self._encode, self._send, context, binding, flags)

    def encode_mean(
        self, target: Bytes, context: StepContext, binding: Binding, flags: BucketFlags
    ) -> Waits[None]:
        """Encode the mean of this rank's chunk, after the round; only owners call it.

        c = sum / N + decay r; target <- encode(c); next r <- c - decode(target), where r is the server-side error.
        Random draws do not depend on the rank, so the result does not depend on which rank owns a chunk.
        """
        device = self._chunks.device
        with binding.span("reduce"):
            for part, segments in zip(self._chunks.parts, self._own, strict=True):
                if part.group.feedback:
                    binding.owned(segments.table, segments.rows)
            noted = [segments.flags() for segments in self._own]
            divisor = float(self._roles.contributions)
            with device.kernels.together(self._own[0].routine) as started:
                for part, segments, found in zip(self._chunks.parts, self._own, noted, strict=True):
                    decay = part.group.decay_at(context.rate_ratio)
                    part.codec.reduce(
                        device, segments.table, self.codes, target, found, context.shared, divisor, decay
                    )
        if started is not DONE:
            yield from finish(started, binding, "reduce")
        for segments, found in zip(self._own, noted, strict=True):
            segments.note(found, flags)

    @cached_property
    def _sum(self) -> WholeCodes:
        """Return the object that adds the codes of this rank's chunk in float32, for :meth:`run`."""
        parts = [
            Part(part.codec, replace(part.group, table=own.table, layers=own.layers), own.header_index)
            for part, own in zip(self._chunks.parts, self._own, strict=True)
        ]
        return WholeCodes(parts, self._chunks.layers, self._roles.contributions, self._memory.local)


class AllGather:
    """Sends the code of each chunk from its owner to all ranks, which decode the same codes of all chunks.

    :meth:`run` encodes this rank's chunk first: c = x + decay r. A reduction that has encoded its chunk into ``own``
    calls :meth:`gather` and ``gathered.decode`` instead. An owner decodes its own code as well, so all ranks have the
    same bytes. Random draws do not depend on the rank, so the result does not depend on which rank owns a chunk. A
    value is encoded once.

    Wire: one round; a rank sends N-1 times the code of its chunk, with a header each.
    State: with :meth:`run`, the residual of this rank's chunk, for groups with feedback.
    Source: Markov 2024, section 3.5.1; Markov et al. 2023 (QSDP) for weights.
    """

    def __init__(
        self, chunks: Chunks, rank: int, world: int, roles: Roles | None = None, memory: Memory = HOST_MEMORY
    ) -> None:
        roles = roles or Roles.of(world, world)
        self._chunks = chunks
        self._me = me = roles.ranks.index(rank)
        owns, others = me < roles.owners, len(roles.ranks) - 1
        #: The codes of all chunks.
        self.gathered = Mean(chunks, memory)
        self.rounds = 1 if others else 0
        self.bytes_sent = others * chunks.sizes[me] if owns else 0
        messages = self.gathered.messages
        arrivals = [(roles.ranks[j], messages[j]) for j in range(roles.owners) if j != me]
        if roles.owners < world:
            own = [(r, messages[me]) for r in roles.ranks if r != rank and owns]
            self._move = exchange(own, arrivals, whole=True)
        else:
            gather = transport.AllGather(self.gathered.buffer, chunks.sizes)
            self._move = Move(gather, [messages[me]], arrivals, whole=True)
        #: The rounds of :meth:`run`, in which a message has the flags of its owner alone.
        self.moves = [replace(self._move, whole=False, common=True)] * self.rounds

    @property
    def own(self) -> Bytes:
        """Return the message of this rank's chunk; only owners have one."""
        return self.gathered.messages[self._me].buffer

    def run(self, context: StepContext, binding: Binding, flags: BucketFlags) -> Rounds:
        """Encode this rank's chunk, gather all chunks and decode them to the outputs; every rank must own a chunk."""
        shared = StepContext(context.shared, context.world)
        yield from encode(self._chunks.parts, self._inputs, self.own, shared, binding, flags)
        yield from self.moves
        return (yield from self.gathered.decode(context, binding, flags))

    def gather(self) -> Waits[None]:
        """Gather codes of means: afterwards ``gathered`` and the flags are the same on all ranks."""
        if self.rounds:
            yield self._move

    @property
    def sent_to(self) -> list[int]:
        """Return the bytes that one run sends to each rank; every rank must own a chunk."""
        sizes = self._chunks.sizes
        return [0 if j == self._me else sizes[self._me] for j in range(len(sizes))]

    @cached_property
    def _inputs(self) -> list[ChunkSegments]:
        return self._chunks.only(self._me)
