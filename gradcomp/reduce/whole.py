"""Whole codes of all ranks, added by one rank or by each of them, in float32."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gradcomp.kernels.codec import Codec, Draw
from gradcomp.kernels.cuda.twins import address_of
from gradcomp.kernels.segments import FLOAT32, FP32, OWNER_RANK, VOTE
from gradcomp.reduce.base import Binding, Bytes, Call, Part
from gradcomp.reduce.header import Ballot
from gradcomp.reduce.pieces import Chunks, Pieces, decode
from gradcomp.transport.base import Room

_LINE_BYTES = 64


def as_float32(parts: Sequence[Part]) -> list[Part]:
    """The parts as they travel uncompressed."""
    return [Part(Codec(FP32), part.group, part.slots) for part in parts]


def floats(chunks: Chunks, room: Room) -> Bytes:
    """A message of uncompressed parts, whose floats begin at a cache line, so that tables may refer to them."""
    lead, size = chunks.header.nbytes, chunks.sizes[0]
    begin = -lead % _LINE_BYTES  # memory of a device begins at a line
    made = room(begin + size + _LINE_BYTES, [(begin, begin + lead)])
    begin = -(address_of(made) + lead) % _LINE_BYTES
    return made[begin : begin + size]


class WholeCodes:
    """Codes of whole buckets, and their sum as a message of float32.

    ``sum``: what :meth:`add` writes; N times the mean, or, of votes, the majority.
    """

    def __init__(self, parts: Sequence[Part], layers: int, world: int, room: Room) -> None:
        self._world = world
        self.codes = Chunks(parts, layers, 1)
        self.dense = Chunks(as_float32(parts), layers, 1)
        self.sum = floats(self.dense, room)
        self._places = self.codes.place()
        for pieces in self._places:
            pieces.table["dtype"] = FLOAT32
        self._dense_places = self.dense.place()

    def add(self, payloads: Sequence[Bytes], call: Call) -> None:
        """sum <- value of the first payload + value of the second + ..."""
        for part, pieces, dense in zip(self.codes.parts, self._places, self._dense_places, strict=True):
            places = dense.table["payload"].astype(np.uint64)
            pieces.table["output"] = np.uint64(address_of(self.sum)) + places
            if part.codec.kind == VOTE:
                self._count(part.codec, pieces, payloads, call)
                continue
            part.codec.decode(pieces.table, payloads[0], pieces.flags())
            for payload in payloads[1:]:
                part.codec.add(pieces.table, payload)

    def _count(self, codec: Codec, pieces: Pieces, payloads: Sequence[Bytes], call: Call) -> None:
        """The majority is what the codec makes of the mean; times N, as all others."""
        majority: Bytes = np.zeros(self.codes.sizes[0], dtype=np.uint8)
        flags = pieces.flags()
        shared = Draw(call.draw.seed, call.draw.step, OWNER_RANK)
        codec.reduce(pieces.table, payloads, majority, flags, shared, float(self._world))
        codec.decode(pieces.table, majority, flags, scale=float(self._world))

    def decode(self, message: Bytes, call: Call, binding: Binding, ballot: Ballot) -> list[Bytes]:
        """output <- unscale (sum / N), NaN in layers that are not finite; flags by part and segment."""
        places = self._dense_places
        return decode(self.dense.parts, places, message, call, binding, ballot, float(self._world))
