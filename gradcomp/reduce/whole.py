"""The codes of a whole exchange bucket from all ranks are added in float32, by one rank or by each of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gradcomp import kernels
from gradcomp.kernels.codec import Codec, Draw
from gradcomp.kernels.cuda.mirrors import address_of
from gradcomp.kernels.segments import FLOAT32, FP32, OWNER_RANK, VOTE
from gradcomp.kernels.step import StepContext
from gradcomp.reduce.base import Binding, Bytes, Message, Part, Rounds, Waits, device_of
from gradcomp.reduce.chunks import Chunks, ChunkSegments, decode
from gradcomp.reduce.header import BucketFlags
from gradcomp.transport.base import Allocator

_LINE_BYTES = 64


def as_float32(parts: Sequence[Part]) -> list[Part]:
    """Return the parts with codecs that send float32."""
    return [Part(Codec(FP32), part.group, part.header_index) for part in parts]


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

    def add(self, messages: Sequence[Message], context: StepContext, binding: Binding) -> Waits[None]:
        """Add messages in order: sum <- decode(first message) + decode(second message) + ..."""
        payloads = [message.buffer for message in messages]
        with binding.span("reduce"):
            for part, segments, dense in zip(self.codes.parts, self._places, self._dense_places, strict=True):
                places = dense.table["payload"].astype(np.uint64)
                segments.table["output"] = np.uint64(address_of(self.sum)) + places
                if part.codec.kind == VOTE:
                    self._count(part.codec, segments, payloads, context)
            with kernels.together(self._device) as started:
                for part, segments in zip(self.codes.parts, self._places, strict=True):
                    if part.codec.kind == VOTE:
                        continue
                    on = self._device.kernels
                    part.codec.decode(segments.table, payloads[0], segments.flags(), on=on)
                    for payload in payloads[1:]:
                        part.codec.add(segments.table, payload, on)
        if not started.done():
            yield started
        with binding.span("reduce"):
            started.finish()

    def _count(
        self, codec: Codec, segments: ChunkSegments, payloads: Sequence[Bytes], context: StepContext
    ) -> None:
        """Write N times the majority: the codec encodes the mean of the votes as their majority."""
        majority: Bytes = np.zeros(self.codes.sizes[0], dtype=np.uint8)
        flags = segments.flags()
        shared, on = Draw(context.draw.seed, context.draw.step, OWNER_RANK), self._device.kernels
        codec.reduce(segments.table, payloads, majority, flags, shared, float(self._world), on=on)
        codec.decode(segments.table, majority, flags, scale=float(self._world), on=on)

    def decode(self, message: Bytes, context: StepContext, binding: Binding, flags: BucketFlags) -> Rounds:
        """Decode a message of the sum: output <- unscale (sum / N), NaN in layers that are not finite.

        Returns one flag per segment for each part: nonzero where a mean is not finite.
        """
        places = self._dense_places
        return decode(self.dense.parts, places, message, context, binding, flags, float(self._world))
