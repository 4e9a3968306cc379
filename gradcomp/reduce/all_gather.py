"""The all-gather brings the chunk of every owner to all ranks."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from gradcomp.kernels.codec import Draw
from gradcomp.kernels.segments import OWNER_RANK
from gradcomp.kernels.step import StepContext
from gradcomp.reduce.base import HOST_MEMORY, Binding, Bytes, Memory, Move, Rounds, Waits, exchange
from gradcomp.reduce.chunks import Chunks, ChunkSegments, Mean, encode
from gradcomp.reduce.header import BucketFlags
from gradcomp.reduce.reduce_scatter import Roles
from gradcomp.transport import base as transport


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
        self._roles = roles = roles or Roles.of(world, world)
        self._chunks, self._world, self._rank = chunks, world, rank
        self._me = me = roles.ranks.index(rank)
        self._owns = me < roles.owners
        others = len(roles.ranks) - 1
        #: The codes of all chunks.
        self.gathered = Mean(chunks, memory)
        self.rounds = 1 if others else 0
        self.bytes_sent = others * chunks.sizes[me] if self._owns else 0
        self._move = self._prepared()

    @property
    def own(self) -> Bytes:
        """Return the message of this rank's chunk; only owners have one."""
        return self.gathered.messages[self._me].buffer

    def run(self, context: StepContext, binding: Binding, flags: BucketFlags) -> Rounds:
        """Encode this rank's chunk, gather all chunks and decode them to the outputs; every rank must own a chunk."""
        shared = StepContext(Draw(context.draw.seed, context.draw.step, OWNER_RANK), context.world)
        yield from encode(self._chunks.parts, self._inputs, self.own, shared, binding, flags)
        if self.rounds:
            yield self.move
        return (yield from self.gathered.decode(context, binding, flags))

    def gather(self) -> Waits[None]:
        """Gather codes of means: afterwards ``gathered`` and the flags are the same on all ranks."""
        if self.rounds:
            yield self._move

    @cached_property
    def move(self) -> Move:
        """Return the round of :meth:`run`, in which a message has the flags of its owner alone."""
        return replace(self._move, whole=False, common=True)

    @cached_property
    def _inputs(self) -> list[ChunkSegments]:
        return self._chunks.only(self._me)

    def _prepared(self) -> Move:
        roles, me, messages = self._roles, self._me, self.gathered.messages
        others = [(roles.ranks[j], messages[j]) for j in range(roles.owners) if j != me]
        if roles.owners < self._world:
            own = [(rank, messages[me]) for i, rank in enumerate(roles.ranks) if i != me and self._owns]
            return exchange(own, others, whole=True)
        gather = transport.AllGather(self.gathered.buffer, self._chunks.sizes)
        return Move(gather, [messages[me]], others, whole=True)
