"""What the reductions share: a bucket cut into chunks, coded, and decoded again."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from gradcomp import kernels
from gradcomp.core.errors import WireFormatError
from gradcomp.kernels.codec import Sizes, Table
from gradcomp.kernels.segments import FLOAT32
from gradcomp.reduce.base import HOST_MEMORY, Binding, Bytes, Call, Memory, Part
from gradcomp.reduce.header import NONFINITE, Ballot, ByteHeader, Stamp, check_covers


@dataclass(eq=False)
class Pieces:
    """Segments of one part after cutting: a table, and for each row what it was cut from.

    Rows are in the order of the chunks; those of chunk j are ``bounds[j]`` to ``bounds[j + 1]``.
    """

    table: Table
    layers: Sizes
    slots: Sizes
    segments: Sizes
    bounds: Sizes
    rows: Sizes = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    def flags(self) -> Bytes:
        """One per row, none of them set."""
        return np.zeros(len(self.table), dtype=np.uint8)

    def vote(self, flags: Bytes, states: Bytes) -> None:
        """Say of the layers whose rows are flagged that they are not finite."""
        if flags.any():
            states[self.slots[flags != 0]] |= NONFINITE

    def chunk(self, j: int) -> Pieces:
        """A view of one chunk's rows."""
        rows = slice(int(self.bounds[j]), int(self.bounds[j + 1]))
        table = self.table[rows]
        ends = np.array([0, len(table)], dtype=np.int64)
        return Pieces(table, self.layers[rows], self.slots[rows], self.segments[rows], ends)


class Chunks:
    """The segments of a bucket's parts, cut into ``count`` chunks of nearly equal payload bytes.

    Borders fall on quantisation buckets. A chunk travels as one message, of ``sizes[j]`` bytes: a header, then the
    payloads of its pieces, part by part.
    """

    def __init__(self, parts: Sequence[Part], layers: int, count: int) -> None:
        self.parts = parts
        self.layers = layers
        self.count = count
        self._pieces = _cut(parts, count)
        begins = np.full(count, ByteHeader.size(layers), dtype=np.int64)
        for part, pieces in zip(parts, self._pieces, strict=True):
            ends = np.concatenate(([0], np.cumsum(part.codec.wire_bytes(pieces.table))))
            of_chunks = ends[pieces.bounds]
            rows = np.diff(pieces.bounds)
            pieces.table["payload"] = ends[:-1] + np.repeat(begins - of_chunks[:-1], rows)
            begins += np.diff(of_chunks)
        #: Of every chunk: of what its header announces, and of the message.
        self.payload_bytes: list[int] = (begins - ByteHeader.size(layers)).tolist()
        self.header = ByteHeader(layers, np.array(self.payload_bytes, dtype=np.int64))
        self.sizes = self.header.message_bytes

    def messages(self, memory: Memory, sizes: Sequence[int]) -> Bytes:
        """Room for messages of these sizes, one behind the other."""
        *begins, end = np.cumsum([0, *sizes]).tolist()
        headers = [(at, at + self.header.nbytes) for at, size in zip(begins, sizes, strict=True) if size]
        return memory.messages(end, headers)

    def copies(self, memory: Memory, count: int, j: int = 0) -> Bytes:
        """Room for ``count`` messages of chunk j: a row each."""
        return self.messages(memory, [self.sizes[j]] * count).reshape(count, self.sizes[j])

    def place(self, bases: Sequence[int] | None = None) -> list[Pieces]:
        """Per part, all pieces, with messages that begin at ``bases`` of one buffer, or each in a buffer of its own."""
        placed = []
        for pieces in self._pieces:
            table = pieces.table.copy()
            if bases is not None:
                table["payload"] += np.repeat(np.asarray(bases, dtype=np.int64), np.diff(pieces.bounds))
            placed.append(Pieces(table, pieces.layers, pieces.slots, pieces.segments, pieces.bounds))
        return placed

    def inputs(self, bases: Sequence[int] | None = None) -> list[Pieces]:
        """:meth:`place` for what reads gradients: of a prepared group they are float32."""
        placed = self.place(bases)
        for part, pieces in zip(self.parts, placed, strict=True):
            if part.group.prepared:
                pieces.table["dtype"] = FLOAT32
        return placed

    def only(self, j: int) -> list[Pieces]:
        """Per part, the pieces of one chunk, in a message of its own."""
        placed = []
        for pieces in self._pieces:
            mine = pieces.chunk(j)
            mine.table = mine.table.copy()
            placed.append(mine)
        return placed


class Mean:
    """The coded mean as every rank has it in the end, chunk behind chunk, and its way to the outputs."""

    def __init__(self, chunks: Chunks, memory: Memory = HOST_MEMORY) -> None:
        self._chunks = chunks
        self._bounds = np.concatenate(([0], np.cumsum(chunks.sizes))).tolist()
        self._pieces = chunks.place(self._bounds[:-1])
        self.buffer = chunks.messages(memory, chunks.sizes)
        self._views = [self.buffer[a:b] for a, b in itertools.pairwise(self._bounds)]

    def chunk(self, j: int) -> Bytes:
        """The message of one chunk: a view."""
        return self._views[j]

    def read(
        self,
        stamp: Stamp,
        round_number: int,
        senders: Sequence[int],
        voters: int,
        ballot: Ballot,
        own: Bytes | None = None,
    ) -> int:
        """Check every chunk's header, add the states to the ballot; return the ready votes, on which all agree.

        ``own``: the states that this rank sent, where all states come back.
        """
        header = self._chunks.header
        header.stamp(stamp, round_number, 0)
        counts = []
        for j, sender in enumerate(senders):
            ready, states = header.read(self.chunk(j), j, sender, voters)
            if own is not None:
                check_covers(states, own, f"rank {sender}")
            ballot.states |= states
            counts.append(ready)
        if len(set(counts)) != 1:
            raise WireFormatError(f"ranks {list(senders)} counted {counts} votes for the next plan")
        return counts[0]

    def decode(self, call: Call, binding: Binding, ballot: Ballot, divisor: float = 1.0) -> list[Bytes]:
        """output <- unscale (value / divisor), NaN in layers that are not finite; flags by part and segment."""
        with binding.span("decode"):
            return decode(self._chunks.parts, self._pieces, self.buffer, call, binding, ballot, divisor)


def encode(
    parts: Sequence[Part], pieces: Sequence[Pieces], target: Bytes, call: Call, binding: Binding
) -> Bytes:
    """Encode what this rank contributes; return its votes, with what turned out not to be finite.

    c = scale g + decay r; target <- encode(c); next residual <- c - decode(target).
    """
    states = call.states.copy()
    for part, mine in zip(parts, pieces, strict=True):
        binding.sources(mine.table, mine.layers, part.group)
    flags = [mine.flags() for mine in pieces]
    with kernels.together(*(mine.table for mine in pieces)):
        for part, mine, found in zip(parts, pieces, flags, strict=True):
            scale, decay = part.group.scale(call.scale), part.group.decay_at(call.rate_ratio)
            part.codec.encode(mine.table, target, found, call.draw, scale=scale, decay=decay)
    for mine, found in zip(pieces, flags, strict=True):
        mine.vote(found, states)
    return states


def decode(
    parts: Sequence[Part],
    pieces: Sequence[Pieces],
    source: Bytes,
    call: Call,
    binding: Binding,
    ballot: Ballot,
    divisor: float,
) -> list[Bytes]:
    """output <- unscale (value / divisor), NaN in layers that are not finite; flags by part and segment."""
    nonfinite = ballot.nonfinite.view(np.uint8)
    for mine in pieces:
        binding.outputs(mine.table, mine.layers)
    flags = [nonfinite[mine.slots] for mine in pieces]
    with kernels.together(*(mine.table for mine in pieces)):
        for part, mine, found in zip(parts, pieces, flags, strict=True):
            part.codec.decode(mine.table, source, found, divisor=divisor, scale=call.unscale)
    results = []
    for part, mine, found in zip(parts, pieces, flags, strict=True):
        merged: Bytes = np.zeros(len(part.group.table), dtype=np.uint8)
        if found.any():
            merged[mine.segments[found != 0]] = 1
        results.append(merged)
    return results


def _cut(parts: Sequence[Part], count: int) -> list[Pieces]:
    totals = [int(part.codec.wire_bytes(part.group.table).sum()) for part in parts]
    targets = [sum(totals) * (j + 1) / count for j in range(count)]
    chunk, done = 0, 0.0
    cut = []
    for part in parts:
        rows: list[tuple[int, int, int, int]] = []  # chunk, segment, from which element of it, how many
        table = part.group.table
        for i, nbytes in enumerate(part.codec.wire_bytes(table).tolist()):
            length, step = int(table["length"][i]), int(table["bucket_size"][i])
            if length == 0:
                rows.append((chunk, i, 0, 0))
            at = 0
            while at < length:
                # Elements up to the border of this chunk, rounded to a whole number of buckets.
                room = (targets[chunk] - done) * length / nbytes
                take = length - at
                if chunk < count - 1 and room < take:
                    take = min(take, max(0, round(room / step)) * step)
                if take:
                    rows.append((chunk, i, at, take))
                    at += take
                    done += take * nbytes / length
                if at < length:
                    chunk += 1
        cut.append(_pieces(part, np.array(rows, dtype=np.int64).reshape(-1, 4), count))
    return cut


def _pieces(part: Part, rows: npt.NDArray[np.int64], count: int) -> Pieces:
    segments = rows[:, 1].copy()
    table = part.group.table[segments].copy()
    table["start"] += rows[:, 2]
    table["length"] = rows[:, 3]
    bounds = np.searchsorted(rows[:, 0], np.arange(count + 1)).astype(np.int64)
    return Pieces(table, part.group.layers[segments], part.slots[segments], segments, bounds)
