"""Sums that travel: a rank decodes what arrives, adds its own contribution and encodes the sum."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from gradcomp.core.errors import ConfigError
from gradcomp.core.scheme import NAMES
from gradcomp.kernels import selection
from gradcomp.kernels.codec import Codec
from gradcomp.kernels.segments import BF16, FP32, VOTE
from gradcomp.reduce.base import Binding, Bytes, Call, Part
from gradcomp.reduce.pieces import Chunks, Pieces, encode

Addresses = npt.NDArray[np.uint64]

#: Reductions in which codes stand for sums over some of the ranks.
PARTIAL = ("ring", "tree", "hierarchical")


def carried(parts: Sequence[Part]) -> list[Part]:
    """The parts as their partial sums travel.

    What is to be exact travels as float32: bfloat16 holds the gradients, not their sums. ConfigError for votes, which
    say nothing unless they are counted all at once.
    """
    for part in parts:
        if part.codec.kind == VOTE:
            others = ", ".join(name for name in NAMES if name not in PARTIAL)
            raise ConfigError(
                f"{part.group.compressor.name} takes a majority of all ranks, of which {', '.join(PARTIAL)} make "
                f"partial sums; it works with the reductions {others}"
            )
    return [
        Part(Codec(FP32), part.group, part.slots)
        if part.codec.kind == BF16 and part.group.compressor.is_exact
        else part
        for part in parts
    ]


class PartialSums:
    """This rank's side of chunks whose sums travel.

    c = sum of what arrived + scale g + decay r; message <- encode(c); next residual <- c - decode(message).

    What is lost is in the units of a sum over ranks, and stays with the rank that lost it, as a part of its first
    residual: sum of contributions = sum of next residuals + what the last message holds. No second residual is needed.
    A rank encodes every element once in a step, so draws are its own.
    """

    def __init__(self, chunks: Chunks) -> None:
        self._parts = chunks.parts
        self._inputs = chunks.inputs()
        self._sums = chunks.place()

    def encode(
        self, j: int, received: Sequence[Bytes], message: Bytes, call: Call, binding: Binding
    ) -> Bytes:
        """Add this rank's contribution to the codes of chunk j, in order; return its votes."""
        inputs = [pieces.chunk(j) for pieces in self._inputs]
        if not received:
            return encode(self._parts, inputs, message, call, binding)
        states = call.states.copy()
        for part, mine, pieces in zip(self._parts, inputs, self._sums, strict=True):
            sums = pieces.chunk(j)
            flags = mine.flags()
            lengths = mine.table["length"]
            vector = part.group.scratch.vector("contribution", int(lengths.sum()))
            where = np.uint64(vector.address) + (4 * (np.cumsum(lengths) - lengths)).astype(np.uint64)
            # To the kernel, what the rank adds is the residual of the sum.
            sums.table["shadow"] = contribute(part, mine, where, flags, call, binding)
            sums.table["residual"] = where
            part.codec.reduce(sums.table, received, message, flags, call.draw, 1.0)
            mine.vote(flags, states)
        return states


def contribute(
    part: Part, mine: Pieces, where: Addresses, flags: Bytes, call: Call, binding: Binding
) -> Addresses:
    """c = scale g + decay r, in float32, at these addresses; returns those of the next residuals, 0 if none is kept."""
    table, group = mine.table, part.group
    binding.sources(table, mine.layers, group)
    shadows = table["shadow"].copy()
    table["shadow"] = where
    factors = np.full(len(table), group.scale(call.scale), dtype=np.float32)
    selection.contribute(table, flags, factors, decay=group.decay_at(call.rate_ratio))
    table["shadow"] = shadows
    return shadows
