"""Reduce-scatter and all-gather in two levels: inside hosts that have several ranks, and between hosts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from gradcomp.core.topology import Topology
from gradcomp.kernels.cuda.mirrors import address_of
from gradcomp.kernels.replayed_calls import DONE
from gradcomp.kernels.segments import FLOAT32
from gradcomp.kernels.step import StepContext
from gradcomp.reduce.base import HOST_MEMORY, Binding, Memory, Message, Move, Part, Rounds, Waits, exchange
from gradcomp.reduce.chunks import Chunks, Mean, WholeCodes, as_float32, encode, finish
from gradcomp.reduce.halves import AllGather
from gradcomp.reduce.header import BucketFlags
from gradcomp.transport.base import Bytes, Exchange


class HostAllGather(AllGather):
    """Sends the code of each chunk once to every other host, where one rank passes it on unchanged.

    Round 0: a rank sends the code of its chunk to the rank that serves it on each other host, see
    :meth:`gradcomp.core.topology.Topology.served`. Round 1: a rank sends the codes of all ranks that it serves, its own
    included, to each other rank of its host, with the headers of round 0. All ranks decode the bytes that
    :class:`AllGather` gives them.

    Wire: two rounds. For codes of d bytes for each of N chunks and H hosts of L ranks, a rank sends (H-1) d bytes to
    other hosts, instead of (N-L) d, and (L-1) H d bytes inside its host. Each message has a header per chunk.
    State: as in :class:`AllGather`.
    Source: Markov 2024, section 5.6.1, which names hierarchical collectives and does not describe them.
    """

    def __init__(self, chunks: Chunks, rank: int, topology: Topology, memory: Memory = HOST_MEMORY) -> None:
        self._chunks, self._me, self.rounds = chunks, rank, 2
        members, served = topology.members(rank), topology.served(rank)
        self.gathered = Mean(chunks, memory, [j for numbers in served for j in numbers])
        messages = self.gathered.messages
        *begins, end = np.cumsum([0, *(sum(chunks.sizes[j] for j in numbers) for numbers in served)]).tolist()
        parts = dict(zip(members, np.split(self.gathered.buffer[:end], begins[1:]), strict=True))
        own = members.index(rank)
        others = [
            (member, numbers) for member, numbers in zip(members, served, strict=True) if member != rank
        ]
        counterparts = topology.counterparts(rank)
        across = exchange(
            [(counterpart, messages[rank]) for counterpart in counterparts],
            [(j, messages[j]) for j in served[own] if j != rank],
        )
        inside = Exchange(
            [(member, parts[rank]) for member, _ in others], [(member, parts[member]) for member, _ in others]
        )
        arrivals = [(j, messages[j]) for _, numbers in others for j in numbers]
        self.moves = [replace(across, common=True), Move(inside, arrivals=arrivals, framed_in=0, common=True)]
        sent = dict.fromkeys(counterparts, chunks.sizes[rank])
        sent |= {member: len(parts[rank]) for member, _ in others}
        self._sent_to = [sent.get(each, 0) for each in range(topology.world)]
        self.bytes_sent = sum(self._sent_to)

    @property
    def sent_to(self) -> list[int]:
        return self._sent_to


class HostReduceScatter:
    """Ranks of a host add their values of each chunk exactly; one of them encodes the sum for the chunk's owner.

    Round 0: a rank sends each other rank of its host its values, in float32, of the chunks of all ranks that this one
    serves, see :meth:`gradcomp.core.topology.Topology.served`; that one adds the values of its host in rank order.
    Round 1: it encodes the sum of each chunk that it serves on another host, and sends the code to the chunk's owner.
    The owner adds the sums of the hosts in order of the hosts, its own host's without coding it:

        m = (sum over hosts h of decode(encode(s_h)), or s_h on the owner's host) / N, s_h = sum of h's ranks.

    An owner learns the flags of all ranks. That a sum overflows is known to the ranks that add it or decode it.

    Wire: two rounds. For H hosts of L ranks, and chunks of n/N values and codes of d bytes, a rank sends (H-1) d bytes
    to other hosts, instead of (N-L) d, and 4 n (L-1)/L bytes inside its host. Each message has a header per chunk.
    State: none; compressors with residuals are refused.
    Source: Markov 2024, section 5.6.1, which names hierarchical collectives and does not describe them.
    """

    rounds = 2

    def __init__(self, chunks: Chunks, rank: int, topology: Topology, memory: Memory = HOST_MEMORY) -> None:
        self._chunks = chunks
        self._dense = dense = Chunks(as_float32(chunks.parts), chunks.layers, chunks.count, chunks.borders)
        dense.header.known = chunks.header.known  # what the request allows
        members, served = topology.members(rank), topology.served(rank)
        own = members.index(rank)
        others = [place for place in range(len(members)) if place != own]

        # The buffer has this rank's values of all chunks: those that the first member serves, then the second, ...
        order = [j for numbers in served for j in numbers]
        begins = dict(zip(order, np.cumsum([0, *(dense.sizes[j] for j in order)]).tolist(), strict=False))
        sizes = [sum(dense.sizes[j] for j in numbers) for numbers in served]
        self._values = dense.messages(memory, [dense.sizes[j] for j in order])
        self._inputs = dense.inputs([begins[j] for j in range(chunks.count)])
        *starts, end = np.cumsum([0, *sizes]).tolist()
        parts = np.split(self._values[:end], starts[1:])
        arrived = dense.messages(memory, [dense.sizes[j] for _ in others for j in served[own]])
        rows = arrived.reshape(len(others), sizes[own])
        inside = Exchange(
            [(members[place], parts[place]) for place in others],
            list(zip([members[place] for place in others], rows, strict=True)),
        )
        sends = [dense.message(self._values[begins[j] :], j) for place in others for j in served[place]]
        at = {j: begins[j] - starts[own] for j in served[own]}
        arrivals = [
            (members[place], dense.message(row[at[j] :], j))
            for place, row in zip(others, rows, strict=True)
            for j in served[own]
        ]
        # In rank order; all have the layout of ``_sums``.
        self._addends: list[Bytes] = [*rows[:own], parts[own], *rows[own:]]
        self._sums = dense.messages(memory, [dense.sizes[j] for j in served[own]])
        self._sum_places = dense.some(served[own])

        self._coded = [j for j in served[own] if j != rank]
        self._codes = chunks.messages(memory, [chunks.sizes[j] for j in self._coded])
        self._code_places = chunks.some(self._coded)
        code_at = np.cumsum([0, *(chunks.sizes[j] for j in self._coded)]).tolist()
        kept = self._sums[at[rank] :]
        for segments, summed in zip(self._code_places, self._sum_places, strict=True):
            chunk_of_row = np.repeat(served[own], np.diff(summed.bounds))
            places = summed.table["payload"][chunk_of_row != rank].astype(np.uint64)
            segments.table["gradient"] = np.uint64(address_of(self._sums)) + places
            segments.table["dtype"] = FLOAT32
        counterparts = topology.counterparts(rank)
        heard = [chunks.message(row, rank) for row in chunks.copies(memory, len(counterparts), rank)]
        outside = [
            (j, chunks.message(self._codes[begin:], j))
            for j, begin in zip(self._coded, code_at, strict=False)
        ]
        self.moves = [
            Move(inside, sends, arrivals),
            exchange(outside, list(zip(counterparts, heard, strict=True))),
        ]
        # The hosts' sums of this rank's chunk, in the order in which they are added.
        self._exact = Message(kept[: dense.sizes[rank]], dense.header, rank)
        host = topology.hosts[rank]
        self._addends_of_hosts = [*heard[:host], self._exact, *heard[host:]]
        parts_of_own = [
            Part(part.codec, replace(part.group, table=mine.table, layers=mine.layers), mine.header_index)
            for part, mine in zip(chunks.parts, chunks.only(rank), strict=True)
        ]
        self._total = WholeCodes(parts_of_own, chunks.layers, topology.world, memory.local)
        sent = {members[place]: sizes[place] for place in others} | {j: chunks.sizes[j] for j in self._coded}
        #: The bytes that one run sends to each rank.
        self.sent_to = [sent.get(each, 0) for each in range(topology.world)]
        self.bytes_sent = sum(self.sent_to)

    def run(self, context: StepContext, binding: Binding, flags: BucketFlags) -> Rounds:
        """Write the mean of this rank's chunk to the outputs."""
        inside, between = self.moves
        yield from encode(self._dense.parts, self._inputs, self._values, context, binding, flags)
        yield inside
        yield from self._add(context, binding, flags)
        yield between
        yield from self._total.add(self._addends_of_hosts, context, binding, self._exact)
        return (yield from self._total.decode(self._total.sum, context, binding, flags))

    def _add(self, context: StepContext, binding: Binding, flags: BucketFlags) -> Waits[None]:
        """Add the values of this host's ranks, and encode the sums that go to other hosts."""
        device = self._chunks.device
        found = [segments.flags() for segments in self._sum_places]
        coded = [segments.flags() for segments in self._code_places]
        with binding.span("reduce"), device.kernels.together() as started:
            for part, segments, noted in zip(self._dense.parts, self._sum_places, found, strict=True):
                part.codec.reduce(device, segments.table, self._addends, self._sums, noted, context.draw, 1.0)
            if self._coded:
                for part, segments, noted in zip(self._chunks.parts, self._code_places, coded, strict=True):
                    part.codec.encode(device, segments.table, self._codes, noted, context.draw)
        if started is not DONE:
            yield from finish(started, binding, "reduce")
        for places, noted_of in ((self._sum_places, found), (self._code_places, coded)):
            for segments, noted in zip(places, noted_of, strict=True):
                segments.note(noted, flags)
