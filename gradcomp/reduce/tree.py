"""Binomial tree of codes (Markov 2024, sections 2.2.1 and 3.5.1)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gradcomp.core.scheme import Scheme
from gradcomp.core.topology import Topology
from gradcomp.reduce.base import HOST_MEMORY, Binding, Bytes, Call, Memory, Part, Reduction, Rounds, Waits
from gradcomp.reduce.chunks import Chunks, Mean
from gradcomp.reduce.header import BucketFlags, ByteHeader, check_covers
from gradcomp.reduce.model import Cost, Load, to
from gradcomp.reduce.partial import PartialSums, carried
from gradcomp.reduce.registry import register
from gradcomp.transport.base import Exchange


@register("tree")
class Tree(Reduction):
    """Sums go up a binomial tree to rank 0; its code of the sum of all comes down again.

    Rank r hangs below r without its lowest set bit; that bit, 2^k, is also the round in which it sends. It decodes what
    its children sent in the rounds before, adds them in the order of their ranks and then its own contribution, and
    encodes the sum, once. On the way down messages pass unchanged, so every rank, the root included, decodes the same
    bytes and divides by N.

    Rounds: 2 ceil(log2 N), for any N. Bytes per rank: d for every neighbour, and a header each; at most d ceil(log2 N),
    of the root. Encodes on the longest path: 1 + the most set bits of a rank, that is 1 + log2 N for powers of two. The
    whole payload travels, nothing is cut, and the order of every sum is a function of the ranks alone. State: what each
    encode loses goes to the rank's first residual (see :class:`PartialSums`); there is no second one. Memory: the
    payloads of all children, and the contribution in float32.
    Source: Markov 2024, sections 2.2.1 and 3.5.1. Differs: binomial, so that a rank's children send one after the other
    and no round waits for two messages over one link.
    """

    sums_travel = True

    def __init__(
        self, parts: Sequence[Part], layers: int, rank: int, world: int, memory: Memory = HOST_MEMORY
    ) -> None:
        self._rank, self._world = rank, world
        chunks = Chunks(carried(parts), layers, 1)
        self._header = ByteHeader(layers, np.full(world, chunks.payload_bytes[0], dtype=np.int64))
        self._sums = PartialSums(chunks)
        self._mean = Mean(chunks, memory)
        self._levels = (world - 1).bit_length()
        self._children = children(rank, world)
        self._received = chunks.copies(memory, len(self._children))
        self.rounds = 2 * self._levels
        self.bytes_sent = chunks.sizes[0] * (len(self._children) + (rank > 0))

    @staticmethod
    def cost(load: Load, topology: Topology, scheme: Scheme) -> Cost:
        """Up the levels, and down again."""
        world, ranks = topology.world, np.arange(topology.world)
        (nbytes,) = load.chunks(1)
        ups, decoded = [], 1.0
        for level in range((world - 1).bit_length()):
            sends = ranks & -ranks == 1 << level
            ups.append(to(topology, ranks - (1 << level) * sends, nbytes * sends))
            decoded += max(len(children(r, world)) for r in ranks[sends].tolist())
        decoded += len(children(0, world))
        flows = [*ups, *(up.back() for up in reversed(ups))]
        return Cost(flows, 1 + max(r.bit_count() for r in range(world)), len(ups) + 1, decoded)

    def run(self, call: Call, binding: Binding, bucket_flags: BucketFlags) -> Rounds:
        """2 ceil(log2 N) rounds; see the class."""
        me, header, message = self._rank, self._header, self._mean.buffer
        votes, ready = np.zeros_like(call.states), call.ready
        for level in range(self._levels):
            child, parent = me + (1 << level), me - (1 << level)
            if child in self._children:
                arriving = self._received[self._children.index(child)]
                yield [Exchange([], [(child, arriving)])]
                header.identify(call.header_id, level, 0)
                earlier, states = header.read(arriving, child, child, size(child, self._world))
                ready += earlier
                votes |= states
            elif me & -me == 1 << level:
                yield from self._add(call, binding, level, votes, ready)
                yield [Exchange([(parent, message)], [])]
            else:
                yield [Exchange([], [])]
        if me == 0:
            yield from self._add(call, binding, self._levels, votes, ready)

        for level in reversed(range(self._levels)):
            number = self.rounds - 1 - level
            child, parent = me + (1 << level), me - (1 << level)
            if child in self._children:
                header.identify(call.header_id, number, ready)
                header.write(message, me, votes)
                yield [Exchange([(child, message)], [])]
            elif me & -me == 1 << level:
                yield [Exchange([], [(parent, message)])]
                header.identify(call.header_id, number, 0)
                ready, states = header.read(message, parent, parent, self._world)
                check_covers(states, call.states, f"rank {parent}")
                votes = states.copy()
            else:
                yield [Exchange([], [])]
        bucket_flags.ready = ready
        bucket_flags.states |= votes
        return (yield from self._mean.decode(call, binding, bucket_flags, float(self._world)))

    def _add(self, call: Call, binding: Binding, level: int, votes: Bytes, ready: int) -> Waits[None]:
        """Encode the sum of the subtree; its votes are added to those that are given."""
        message, received = self._mean.buffer, list(self._received)
        votes |= yield from self._sums.encode(0, received, message, call, binding)
        with binding.span("reduce" if received else "encode"):
            self._header.identify(call.header_id, level, ready)
            self._header.write(message, self._rank, votes)


def children(rank: int, world: int) -> list[int]:
    """The ranks directly below, ascending."""
    below = rank & -rank or world
    return [rank + (1 << k) for k in range((below - 1).bit_length()) if rank + (1 << k) < world]


def size(rank: int, world: int) -> int:
    """Ranks in the subtree that hangs at ``rank``, itself included."""
    return min(rank & -rank or world, world - rank)
