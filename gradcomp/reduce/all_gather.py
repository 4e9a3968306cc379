"""All-gather: every rank gets the chunks that the others own."""

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
    """The owner of chunk j sends its code to all ranks, and everyone decodes the same codes of all chunks.

    :meth:`run` encodes the sources of the own chunk first: c = x + decay r. A reduction that has coded its chunk into
    ``own`` goes on with :meth:`gather` and ``gathered.decode``. The owner decodes its own code, too, so all ranks have
    the same bytes.

    Rounds: 1. Bytes per rank: (N-1) times the own code, plus as many headers. Encodes on the longest path: 1. Draws are
    those of an owner, the same on every rank: who owns what changes no bit. State: with :meth:`run`, a residual of the
    own chunk, for groups with feedback.
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
        """The message of the own chunk, on owners."""
        return self.gathered.messages[self._me].buffer

    def run(self, context: StepContext, binding: Binding, flags: BucketFlags) -> Rounds:
        """One round; then all chunks are in the outputs. Every rank owns one."""
        shared = StepContext(Draw(context.draw.seed, context.draw.step, OWNER_RANK), context.world)
        yield from encode(self._chunks.parts, self._inputs, self.own, shared, binding, flags)
        if self.rounds:
            yield self.move
        return (yield from self.gathered.decode(context, binding, flags))

    def gather(self) -> Waits[None]:
        """The round, with what speaks for all ranks: then all of ``gathered``, and the flags, are the same on all."""
        if self.rounds:
            yield self._move

    @cached_property
    def move(self) -> Move:
        """The round of :meth:`run`, in which an owner speaks for itself."""
        return replace(self._move, whole=False, common=True)

    @cached_property
    def _inputs(self) -> list[ChunkSegments]:
        return self._chunks.only(self._me)

    def _prepared(self) -> Move:
        """Codes from their owners to everyone."""
        roles, me, messages = self._roles, self._me, self.gathered.messages
        others = [(roles.ranks[j], messages[j]) for j in range(roles.owners) if j != me]
        if roles.owners < self._world:
            own = [(rank, messages[me]) for i, rank in enumerate(roles.ranks) if i != me and self._owns]
            return exchange(own, others, whole=True)
        gather = transport.AllGather(self.gathered.buffer, self._chunks.sizes)
        return Move(gather, [messages[me]], others, whole=True)
