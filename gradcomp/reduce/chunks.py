"""Cuts exchange buckets into chunks, and encodes, decodes and adds their messages, for all reductions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from gradcomp.kernels.codec import Codec, Sizes, Table
from gradcomp.kernels.cuda.mirrors import address_of
from gradcomp.kernels.replayed_calls import DONE, Pending, Routine
from gradcomp.kernels.segments import FLOAT32, FP32, VOTE, byte_offsets
from gradcomp.kernels.step import StepContext
from gradcomp.reduce.base import (
    HOST_MEMORY,
    Addresses,
    Binding,
    Memory,
    Message,
    Part,
    Rounds,
    Waits,
    device_of,
)
from gradcomp.reduce.header import NONFINITE, BucketFlags, ByteHeader
from gradcomp.transport.base import Allocator, Bytes

_LINE_BYTES = 64
_FLOATS = Codec(FP32)


@dataclass(eq=False)
class ChunkSegments:
    """Holds the segments of one :class:`Part`, cut at the borders of chunks.

    Chunk j has the rows ``bounds[j]`` to ``bounds[j + 1]`` of ``table``. For each row, ``layers`` has the number of its
    layer, ``header_index`` that layer's position in the header, ``cut_from`` the row of the part's own table that it is
    a piece of, and ``rows`` the row number of its server-side error, once that is assigned. ``routine`` keeps the
    kernel calls on the table for the next step.
    """

    table: Table
    layers: Sizes
    header_index: Sizes
    cut_from: Sizes
    bounds: Sizes
    rows: Sizes = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    routine: Routine = field(default_factory=Routine)

    @cached_property
    def offsets(self) -> Addresses:
        """Return :func:`gradcomp.kernels.segments.byte_offsets`; starts and dtypes must not change afterwards."""
        return byte_offsets(self.table)

    @cached_property
    def noted(self) -> Bytes:
        """Return one array with a flag per row, which every decoding writes anew."""
        return np.zeros(len(self.table), dtype=np.uint8)

    def flags(self) -> Bytes:
        """Return a new array with one flag per row, all 0."""
        return np.zeros(len(self.table), dtype=np.uint8)

    def note(self, found: Bytes, flags: BucketFlags) -> None:
        """Set NONFINITE in ``flags`` for the layers of the rows that are flagged in ``found``."""
        if np.count_nonzero(found):
            flags.states[self.header_index[found != 0]] |= NONFINITE

    def copy(self) -> ChunkSegments:
        """Return the same segments with a table of their own."""
        return ChunkSegments(self.table.copy(), self.layers, self.header_index, self.cut_from, self.bounds)

    def chunk(self, j: int) -> ChunkSegments:
        """Return a view of one chunk's rows."""
        rows = slice(int(self.bounds[j]), int(self.bounds[j + 1]))
        table = self.table[rows]
        ends = np.array([0, len(table)], dtype=np.int64)
        return ChunkSegments(table, self.layers[rows], self.header_index[rows], self.cut_from[rows], ends)


class Chunks:
    """Cuts the segments of an exchange bucket into ``count`` chunks.

    By default chunks have nearly equal payload bytes, and their borders are borders of quantisation buckets.
    ``borders`` replaces these: for every part it has a row per segment, with ``count + 1`` element numbers.

    Wire: a chunk is one message of ``sizes[j]`` bytes: a header, then the payloads of its pieces, part by part.
    """

    def __init__(
        self, parts: Sequence[Part], layers: int, count: int, borders: Sequence[Sizes] | None = None
    ) -> None:
        self.parts, self.layers, self.count, self.borders = parts, layers, count, borders
        self.device = device_of(parts)
        self._chunk_segments = (
            _cut(parts, count)
            if borders is None
            else [_cut_at(part, at) for part, at in zip(parts, borders, strict=True)]
        )
        begins = np.full(count, ByteHeader.size(layers), dtype=np.int64)
        for part, segments in zip(parts, self._chunk_segments, strict=True):
            ends = np.concatenate(([0], np.cumsum(part.codec.wire_bytes(segments.table))))
            of_chunks = ends[segments.bounds]
            rows = np.diff(segments.bounds)
            segments.table["payload"] = ends[:-1] + np.repeat(begins - of_chunks[:-1], rows)
            begins += np.diff(of_chunks)
        #: The payload bytes of each chunk, as its header has them; ``sizes`` has the bytes of the messages.
        self.payload_bytes: list[int] = (begins - ByteHeader.size(layers)).tolist()
        self.header = ByteHeader(layers, np.array(self.payload_bytes, dtype=np.int64))
        self.sizes = self.header.message_bytes

    def message(self, buffer: Bytes, j: int) -> Message:
        """Return the message of chunk j in the first bytes of a buffer."""
        return Message(buffer[: self.sizes[j]], self.header, j)

    def messages(self, memory: Memory, sizes: Sequence[int]) -> Bytes:
        """Allocate a buffer for consecutive messages of these sizes."""
        *begins, end = np.cumsum([0, *sizes]).tolist()
        headers = [(at, at + self.header.nbytes) for at, size in zip(begins, sizes, strict=True) if size]
        return memory.messages(end, headers)

    def copies(self, memory: Memory, count: int, j: int = 0) -> Bytes:
        """Allocate buffers for ``count`` messages of chunk j, as rows of an array."""
        return self.messages(memory, [self.sizes[j]] * count).reshape(count, self.sizes[j])

    def place(self, bases: Sequence[int] | None = None) -> list[ChunkSegments]:
        """Return the segments of all chunks, by part.

        Payload offsets are those in one buffer, in which message j begins at byte ``bases[j]``. Without ``bases`` each
        message has a buffer of its own.
        """
        placed = [segments.copy() for segments in self._chunk_segments]
        if bases is not None:
            for segments in placed:
                segments.table["payload"] += np.repeat(np.asarray(bases), np.diff(segments.bounds))
        return placed

    def inputs(self, bases: Sequence[int] | None = None) -> list[ChunkSegments]:
        """Return :meth:`place` with the dtype of the gradients that kernels read: float32 in a prepared group."""
        placed = self.place(bases)
        for part, segments in zip(self.parts, placed, strict=True):
            if part.group.prepared:
                segments.table["dtype"] = FLOAT32
        return placed

    def only(self, j: int) -> list[ChunkSegments]:
        """Return the segments of chunk j, by part; its message has a buffer of its own."""
        return [segments.chunk(j).copy() for segments in self._chunk_segments]

    def some(self, numbers: Sequence[int]) -> list[ChunkSegments]:
        """Return the segments of these chunks, by part; their messages follow one another in one buffer."""
        begins = np.zeros(self.count, dtype=np.int64)
        begins[list(numbers)] = np.cumsum([0, *(self.sizes[j] for j in numbers)])[:-1]
        found = []
        for segments in self.place(begins.tolist()):
            bounds = [range(*segments.bounds[j : j + 2].tolist()) for j in numbers]
            rows = np.array([row for each in bounds for row in each], dtype=np.int64)
            ends = np.cumsum([0, *map(len, bounds)])
            found.append(
                ChunkSegments(
                    segments.table[rows],
                    segments.layers[rows],
                    segments.header_index[rows],
                    segments.cut_from[rows],
                    ends,
                )
            )
        return found


class Mean:
    """Holds the messages with the encoded mean, and decodes them to the outputs.

    They follow one another in ``order``, by default that of the chunks.
    """

    def __init__(
        self, chunks: Chunks, memory: Memory = HOST_MEMORY, order: Sequence[int] | None = None
    ) -> None:
        self._chunks = chunks
        order = range(chunks.count) if order is None else order
        sizes = [chunks.sizes[j] for j in order]
        begins = dict(zip(order, np.cumsum([0, *sizes]).tolist(), strict=False))
        bases = [begins[j] for j in range(chunks.count)]
        self._chunk_segments = chunks.place(bases)
        self.buffer = chunks.messages(memory, sizes)
        #: The message of each chunk, as a view of the buffer.
        self.messages = [chunks.message(self.buffer[at:], j) for j, at in enumerate(bases)]

    def decode(
        self, context: StepContext, binding: Binding, flags: BucketFlags, divisor: float = 1.0
    ) -> Rounds:
        """Decode all chunks to the outputs; see :func:`decode`."""
        return decode(self._chunks.parts, self._chunk_segments, self.buffer, context, binding, flags, divisor)


def encode(
    parts: Sequence[Part],
    segments: Sequence[ChunkSegments],
    target: Bytes,
    context: StepContext,
    binding: Binding,
    flags: BucketFlags,
) -> Waits[None]:
    """Encode this rank's contribution; set the flags of layers in which a value is not finite.

    c = scale g + decay r; target <- encode(c); next residual <- c - decode(target).
    """
    device = device_of(parts)
    with binding.span("compress"):
        for part, mine in zip(parts, segments, strict=True):
            binding.sources(mine.table, mine.layers, part.group, mine.offsets)
        noted = [mine.flags() for mine in segments]
        with device.kernels.together(segments[0].routine) as started:
            for part, mine, found in zip(parts, segments, noted, strict=True):
                scale, decay = part.group.scale(context.scale), part.group.decay_at(context.rate_ratio)
                part.codec.encode(device, mine.table, target, found, context.draw, scale, decay)
    if started is not DONE:
        yield from finish(started, binding, "compress")
    for mine, found in zip(segments, noted, strict=True):
        mine.note(found, flags)


def finish(started: Pending, binding: Binding, span: str) -> Waits[None]:
    """Wait for kernel calls of a device, and put their results into the arrays that they were given."""
    if not started.done():
        yield started
    with binding.span(span):
        started.finish()


def decode(
    parts: Sequence[Part],
    segments: Sequence[ChunkSegments],
    source: Bytes,
    context: StepContext,
    binding: Binding,
    flags: BucketFlags,
    divisor: float,
) -> Rounds:
    """Decode messages to the outputs: output <- unscale (value / divisor), NaN in layers that are not finite.

    Returns one flag per segment for each part: nonzero where a mean is not finite.
    """
    device = device_of(parts)
    with binding.span("decompress"):
        nonfinite = flags.nonfinite.view(np.uint8)
        for part, mine in zip(parts, segments, strict=True):
            binding.outputs(mine.table, mine.layers, part.group, mine.offsets)
        noted = [nonfinite.take(mine.header_index, 0, mine.noted, "clip") for mine in segments]
        with device.kernels.together(segments[0].routine) as started:
            for part, mine, found in zip(parts, segments, noted, strict=True):
                part.codec.decode(device, mine.table, source, found, divisor, context.unscale_mean)
    if started is not DONE:
        yield from finish(started, binding, "decompress")
    results: list[Bytes] = [np.zeros(len(part.group.table), dtype=np.uint8) for part in parts]
    for merged, mine, found in zip(results, segments, noted, strict=True):
        if np.count_nonzero(found):
            merged[mine.cut_from[found != 0]] = 1
    return results


def as_float32(parts: Sequence[Part]) -> list[Part]:
    """Return the parts with codecs that send float32."""
    return [replace(part, codec=Codec(FP32)) for part in parts]


def floats(chunks: Chunks, allocate: Allocator) -> Bytes:
    """Allocate a message of float32 whose values begin at a cache line, so that tables may have addresses in it."""
    lead, size = chunks.header.nbytes, chunks.sizes[0]
    begin = -lead % _LINE_BYTES  # memory of a device begins at a cache line
    made = allocate(begin + size + _LINE_BYTES, [(begin, begin + lead)])
    begin = -(address_of(made) + lead) % _LINE_BYTES
    return made[begin : begin + size]


class WholeCodes:
    """Adds the codes of a whole exchange bucket from all ranks to a message of float32.

    :meth:`add` writes the sum to ``sum``: N times the mean or, for votes, N times the majority.
    """

    def __init__(self, parts: Sequence[Part], layers: int, world: int, allocate: Allocator) -> None:
        self._world, self._device = world, device_of(parts)
        self.codes = Chunks(parts, layers, 1)
        self.dense = Chunks(as_float32(parts), layers, 1)
        self.sum = floats(self.dense, allocate)
        self._places = self.codes.place()
        for segments in self._places:
            segments.table["dtype"] = FLOAT32
        self._dense_places = self.dense.place()

    def add(
        self,
        messages: Sequence[Message],
        context: StepContext,
        binding: Binding,
        exact: Message | None = None,
    ) -> Waits[None]:
        """Add messages in order: sum <- decode(first message) + decode(second message) + ...

        ``exact`` is the one of them that has float32 instead of codes.
        """
        payloads = [message.buffer for message in messages]
        with binding.span("reduce"):
            for part, segments, dense in zip(self.codes.parts, self._places, self._dense_places, strict=True):
                places = dense.table["payload"].astype(np.uint64)
                segments.table["output"] = np.uint64(address_of(self.sum)) + places
                if part.codec.kind == VOTE:
                    self._count(part.codec, segments, payloads, context)
            with self._device.kernels.together() as started:
                tables = self._places if exact is None else self._float_places
                for part, segments, dense in zip(self.codes.parts, self._places, tables, strict=True):
                    if part.codec.kind == VOTE:
                        continue
                    for number, message in enumerate(messages):
                        codec, mine = (_FLOATS, dense) if message is exact else (part.codec, segments)
                        if number == 0:
                            codec.decode(self._device, mine.table, message.buffer, mine.flags())
                        else:
                            codec.add(self._device, mine.table, message.buffer)
        if started is not DONE:
            yield from finish(started, binding, "reduce")

    @cached_property
    def _float_places(self) -> list[ChunkSegments]:
        """Return the segments of a message of float32 that is added to the sum."""
        placed = self.dense.place()
        for segments in placed:
            segments.table["dtype"] = FLOAT32
            places = segments.table["payload"].astype(np.uint64)
            segments.table["output"] = np.uint64(address_of(self.sum)) + places
        return placed

    def _count(
        self, codec: Codec, segments: ChunkSegments, payloads: Sequence[Bytes], context: StepContext
    ) -> None:
        """Write N times the majority: the codec encodes the mean of the votes as their majority."""
        majority: Bytes = np.zeros(self.codes.sizes[0], dtype=np.uint8)
        flags = segments.flags()
        device = self._device
        codec.reduce(device, segments.table, payloads, majority, flags, context.shared, float(self._world))
        codec.decode(device, segments.table, majority, flags, scale=float(self._world))

    def decode(self, message: Bytes, context: StepContext, binding: Binding, flags: BucketFlags) -> Rounds:
        """Decode a message of the sum: output <- unscale (sum / N), NaN in layers that are not finite.

        Returns one flag per segment for each part: nonzero where a mean is not finite.
        """
        places = self._dense_places
        return decode(self.dense.parts, places, message, context, binding, flags, float(self._world))


def _cut(parts: Sequence[Part], count: int) -> list[ChunkSegments]:
    total = sum(int(part.codec.wire_bytes(part.group.table).sum()) for part in parts)
    targets = [total * (j + 1) / count for j in range(count)]
    chunk, done = 0, 0.0
    cut = []
    for part in parts:
        rows: list[tuple[int, int, int, int]] = []  # chunk, segment, first element in it, length
        table = part.group.table
        for i, nbytes in enumerate(part.codec.wire_bytes(table).tolist()):
            length, step = int(table["length"][i]), int(table["bucket_size"][i])
            if length == 0:
                rows.append((chunk, i, 0, 0))
            at = 0
            while at < length:
                # The number of elements up to this chunk's border; ``take`` rounds it to whole quantisation buckets.
                left = (targets[chunk] - done) * length / nbytes
                take = length - at
                if chunk < count - 1 and left < take:
                    take = min(take, max(0, round(left / step)) * step)
                if take:
                    rows.append((chunk, i, at, take))
                    at += take
                    done += take * nbytes / length
                if at < length:
                    chunk += 1
        cut.append(_segments_of(part, np.array(rows, dtype=np.int64).reshape(-1, 4), count))
    return cut


def _cut_at(part: Part, borders: Sizes) -> ChunkSegments:
    table = part.group.table
    starts = table["start"][:, None]
    # A segment may be one block of its layer, so borders outside of it are moved to its ends.
    within = np.clip(borders, starts, starts + table["length"][:, None])
    begins, lengths = within[:, :-1] - starts, np.diff(within)
    chunks, segments = np.nonzero(lengths.T)
    rows = np.stack([chunks, segments, begins[segments, chunks], lengths[segments, chunks]], axis=1)
    return _segments_of(part, rows, borders.shape[1] - 1)


def _segments_of(part: Part, rows: npt.NDArray[np.int64], count: int) -> ChunkSegments:
    segments = rows[:, 1].copy()
    table = part.group.table[segments].copy()
    table["start"] += rows[:, 2]
    table["length"] = rows[:, 3]
    bounds = np.searchsorted(rows[:, 0], np.arange(count + 1)).astype(np.int64)
    return ChunkSegments(table, part.group.layers[segments], part.header_index[segments], segments, bounds)
