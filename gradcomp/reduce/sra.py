"""Scatter-reduce-allgather (thesis, section 3.5.1): the default reduction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from gradcomp.core.header import NONFINITE, Ballot, ByteHeader
from gradcomp.core.state import Range
from gradcomp.kernels.codec import Draw, Sizes, Table
from gradcomp.kernels.segments import FLOAT32, OWNER_RANK
from gradcomp.reduce.base import Binding, Call, Part, Reduction, Rounds
from gradcomp.transport.base import AllGather, AllToAll

Bytes = npt.NDArray[np.uint8]


@dataclass(eq=False)
class _Pieces:
    """Segments of one part after cutting at chunk borders: a table, and for each row what it was cut from."""

    table: Table
    layers: Sizes
    slots: Sizes
    segments: Sizes
    rows: Sizes = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    def flags(self) -> Bytes:
        return np.zeros(len(self.table), dtype=np.uint8)


class ScatterReduceAllgather(Reduction):
    """Every rank owns one chunk of the bucket: it adds all ranks' codes of that chunk and sends the mean to everyone.

    Round 0, all-to-all: rank i sends its encoded chunk j to rank j. The owner decodes the N chunks, its own included,
    adds them in rank order in float32, divides by N, adds its second residual and encodes again. Round 1, all-gather:
    everyone decodes the same N chunks, so all ranks get the same bytes.

    Rounds: 2. Bytes per rank: 2 d (N-1)/N for a payload of d bytes (readings; the thesis's orders are not per rank),
    plus a header per chunk. Encodes on the longest path: 2. Chunks are balanced by payload bytes; their borders fall
    on quantisation buckets, and second-stage draws are the same on every rank, so who owns what changes no bit of the
    mean. State: the second residual of the owned ranges, for groups with feedback.
    """

    def __init__(self, parts: Sequence[Part], layers: int, rank: int, world: int) -> None:
        self._parts = parts
        self._layers = layers
        self._rank = rank
        self._world = world
        chunks = _cut(parts, world)
        payload_bytes = np.array(
            [
                sum(int(p.codec.wire_bytes(c.table).sum()) for p, c in zip(parts, chunk, strict=True))
                for chunk in chunks
            ],
            dtype=np.int64,
        )
        self._header = ByteHeader(layers, payload_bytes)
        sizes = (payload_bytes + self._header.nbytes).tolist()
        self._own_bytes = sizes[rank]
        self.bytes_sent = sum(sizes) - sizes[rank] + (world - 1) * sizes[rank]

        # To send: the other ranks' chunks in rank order, then our own, which does not travel.
        order = [j for j in range(world) if j != rank] + [rank]
        self._sent_at = dict(
            zip(order, np.concatenate(([0], np.cumsum([sizes[j] for j in order])[:-1])).tolist(), strict=True)
        )
        gathered = np.concatenate(([0], np.cumsum(sizes)))
        self._gathered_at = gathered.tolist()
        self._send: Bytes = np.zeros(sum(sizes), dtype=np.uint8)
        self._recv: Bytes = np.zeros((world - 1) * sizes[rank], dtype=np.uint8)
        self._mean: Bytes = np.zeros(sum(sizes), dtype=np.uint8)
        self._send_counts = [0 if j == rank else sizes[j] for j in range(world)]
        self._recv_counts = [0 if j == rank else sizes[rank] for j in range(world)]
        self._sizes = sizes

        self._encode = self._place(chunks, order, [self._sent_at[j] for j in order])
        for part, pieces in zip(parts, self._encode, strict=True):
            if part.group.prepared:
                pieces.table["dtype"] = FLOAT32
        self._reduce = self._place(chunks, [rank], [0])
        self._decode = self._place(chunks, list(range(world)), self._gathered_at[:-1])
        self.ranges = [
            Range(int(layer), int(row["start"]), int(row["length"]))
            for part, pieces in zip(parts, self._reduce, strict=True)
            if part.group.feedback
            for layer, row in zip(pieces.layers, pieces.table, strict=True)
        ]

    def _place(self, chunks: list[list[_Pieces]], order: list[int], bases: list[int]) -> list[_Pieces]:
        """Per part, the pieces of the chunks in ``order``, with payload offsets behind each chunk's header."""
        collected: list[list[_Pieces]] = [[] for _ in self._parts]
        for j, base in zip(order, bases, strict=True):
            at = base + self._header.nbytes
            for p, (part, pieces) in enumerate(zip(self._parts, chunks[j], strict=True)):
                table = pieces.table.copy()
                ends = np.cumsum(part.codec.wire_bytes(table))
                table["payload"] = at + np.concatenate(([0], ends))[:-1]
                at += int(ends[-1]) if len(ends) else 0
                collected[p].append(_Pieces(table, pieces.layers, pieces.slots, pieces.segments))
        return [_join(part) for part in collected]

    def assign(self, rows: Sequence[int]) -> None:
        """Rows of the second residual, in the order of ``ranges``."""
        at = 0
        for part, pieces in zip(self._parts, self._reduce, strict=True):
            if part.group.feedback:
                pieces.rows = np.array(rows[at : at + len(pieces.table)], dtype=np.int64)
                at += len(pieces.table)

    def run(self, call: Call, binding: Binding, ballot: Ballot) -> Rounds:
        """Two rounds; see the class."""
        states = self._encode_all(call, binding)
        yield [AllToAll(self._send, self._send_counts, self._recv, self._recv_counts)]

        payloads = self._payloads(call, states, ballot)
        states = self._reduce_own(call, binding, payloads)
        yield [AllGather(self._mean, self._sizes)]

        self._header.stamp(call.stamp, 1, 0)
        for j in range(self._world):
            chunk = self._mean[self._gathered_at[j] : self._gathered_at[j + 1]]
            ballot.states |= self._header.read(chunk, j, j)[1]
        return self._decode_all(call, binding, ballot)

    def _encode_all(self, call: Call, binding: Binding) -> Bytes:
        states = call.states.copy()
        with binding.span("encode"):
            for part, pieces in zip(self._parts, self._encode, strict=True):
                binding.sources(pieces.table, pieces.layers, part.group)
                flags = pieces.flags()
                part.codec.encode(
                    pieces.table,
                    self._send,
                    flags,
                    call.draw,
                    scale=part.group.scale(call.scale),
                    decay=part.group.decay_at(call.rate_ratio),
                )
                if flags.any():
                    states[pieces.slots[flags != 0]] |= NONFINITE
            self._header.stamp(call.stamp, 0, call.ready)
            for j, at in self._sent_at.items():
                self._header.write(self._send[at:], j, states)
        return states

    def _payloads(self, call: Call, states: Bytes, ballot: Ballot) -> list[Bytes]:
        """The N encoded versions of our chunk in rank order, after their headers were checked and counted."""
        ballot.states |= states
        all_ready = call.ready
        received = iter(self._recv.reshape(self._world - 1, self._own_bytes))
        payloads = []
        for sender in range(self._world):
            if sender == self._rank:
                payloads.append(self._send[self._sent_at[sender] :])
                continue
            chunk = next(received)
            ready, votes = self._header.read(chunk, self._rank, sender)
            ballot.states |= votes
            all_ready += ready
            payloads.append(chunk)
        ballot.ready = all_ready
        return payloads

    def _reduce_own(self, call: Call, binding: Binding, payloads: list[Bytes]) -> Bytes:
        own = self._mean[self._gathered_at[self._rank] : self._gathered_at[self._rank + 1]]
        states: Bytes = np.zeros(self._layers, dtype=np.uint8)
        shared = Draw(call.draw.seed, call.draw.step, OWNER_RANK)
        with binding.span("reduce"):
            for part, pieces in zip(self._parts, self._reduce, strict=True):
                if part.group.feedback:
                    binding.owned(pieces.table, pieces.rows)
                flags = pieces.flags()
                decay = part.group.decay_at(call.rate_ratio)
                part.codec.reduce(pieces.table, payloads, own, flags, shared, float(self._world), decay)
                if flags.any():
                    states[pieces.slots[flags != 0]] |= NONFINITE
            self._header.stamp(call.stamp, 1, 0)
            self._header.write(own, self._rank, states)
        return states

    def _decode_all(self, call: Call, binding: Binding, ballot: Ballot) -> list[Bytes]:
        nonfinite = ballot.nonfinite
        results = []
        with binding.span("decode"):
            for part, pieces in zip(self._parts, self._decode, strict=True):
                binding.outputs(pieces.table, pieces.layers)
                flags = nonfinite[pieces.slots].astype(np.uint8)
                part.codec.decode(pieces.table, self._mean, flags, scale=call.unscale)
                merged: Bytes = np.zeros(len(part.group.table), dtype=np.uint8)
                if flags.any():
                    merged[pieces.segments[flags != 0]] = 1
                results.append(merged)
        return results


def _cut(parts: Sequence[Part], world: int) -> list[list[_Pieces]]:
    """Cut the parts' segments into ``world`` chunks of nearly equal payload bytes, at quantisation buckets."""
    totals = [int(part.codec.wire_bytes(part.group.table).sum()) for part in parts]
    targets = [sum(totals) * (j + 1) / world for j in range(world)]
    rows: list[list[list[tuple[int, int, int]]]] = [[[] for _ in parts] for _ in range(world)]
    chunk, done = 0, 0.0
    for p, part in enumerate(parts):
        table = part.group.table
        for i, nbytes in enumerate(part.codec.wire_bytes(table).tolist()):
            length, step = int(table["length"][i]), int(table["bucket_size"][i])
            if length == 0:
                rows[chunk][p].append((i, 0, 0))
            at = 0
            while at < length:
                # Elements up to the border of this chunk, rounded to a whole number of buckets.
                room = (targets[chunk] - done) * length / nbytes
                take = length - at
                if chunk < world - 1 and room < take:
                    take = min(take, max(0, round(room / step)) * step)
                if take:
                    rows[chunk][p].append((i, at, take))
                    at += take
                    done += take * nbytes / length
                if at < length:
                    chunk += 1
    return [[_pieces(part, rows[j][p]) for p, part in enumerate(parts)] for j in range(world)]


def _pieces(part: Part, rows: list[tuple[int, int, int]]) -> _Pieces:
    segments = np.array([i for i, _, _ in rows], dtype=np.int64)
    table = part.group.table[segments].copy()
    table["start"] += np.array([at for _, at, _ in rows], dtype=np.int64)
    table["length"] = [take for _, _, take in rows]
    return _Pieces(table, part.group.layers[segments], part.slots[segments], segments)


def _join(pieces: list[_Pieces]) -> _Pieces:
    return _Pieces(
        np.concatenate([p.table for p in pieces]),
        np.concatenate([p.layers for p in pieces]),
        np.concatenate([p.slots for p in pieces]),
        np.concatenate([p.segments for p in pieces]),
    )
