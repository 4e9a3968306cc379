"""Rings and trees send partial sums: a rank decodes what arrives, adds its contribution and encodes the sum."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gradcomp import kernels
from gradcomp.core.errors import ConfigError
from gradcomp.core.scheme import names
from gradcomp.kernels import selection
from gradcomp.kernels.codec import Codec
from gradcomp.kernels.segments import BF16, FP32, VOTE
from gradcomp.kernels.step import StepContext
from gradcomp.reduce.base import Addresses, Binding, Bytes, Part, Waits, device_of
from gradcomp.reduce.chunks import Chunks, ChunkSegments, encode
from gradcomp.reduce.header import BucketFlags
from gradcomp.reduce.registry import with_partial_sums
from gradcomp.reduce.varying import fixed


def carried(parts: Sequence[Part]) -> list[Part]:
    """Return the parts with the codecs that encode their partial sums.

    Each has a fixed size. Exact codes of bfloat16 gradients become float32, because bfloat16 cannot hold their sums
    exactly. Raises ConfigError for votes: the majority of a majority and a vote is not that of all votes.
    """
    for part in parts:
        if part.codec.kind == VOTE:
            partial = with_partial_sums()
            others = ", ".join(name for name in names() if name not in partial)
            raise ConfigError(
                f"{part.group.compressor.name} takes a majority over all ranks, which {', '.join(partial)} cannot form "
                f"from partial sums; it works with the reductions {others}"
            )
    return [
        Part(Codec(FP32), part.group, part.header_index)
        if part.codec.kind == BF16 and part.group.compressor.traits.exact
        else part
        for part in fixed(parts)
    ]


class PartialSums:
    """Encodes partial sums of chunks on this rank.

    c = sum of what arrived + scale g + decay r; message <- encode(c); next residual <- c - decode(message).

    State: what an encode loses is in the units of a sum over ranks and stays in the residual of the rank that encoded:
    sum of contributions = sum of next residuals + decode(last message). So no server-side error is needed. A rank
    encodes every element once in a step, so its random draws are those of the rank.
    """

    def __init__(self, chunks: Chunks) -> None:
        self._parts = chunks.parts
        self._inputs = chunks.inputs()
        self._sums = chunks.place()

    def encode(
        self,
        j: int,
        received: Sequence[Bytes],
        message: Bytes,
        context: StepContext,
        binding: Binding,
        flags: BucketFlags,
    ) -> Waits[None]:
        """Add the codes of chunk j that arrived, in order, then this rank's contribution, and encode the sum.

        Sets the flags of layers in which a value is not finite.
        """
        inputs = [segments.chunk(j) for segments in self._inputs]
        if not received:
            yield from encode(self._parts, inputs, message, context, binding, flags)
            return
        with binding.span("reduce"):
            sums = [segments.chunk(j) for segments in self._sums]
            noted = [mine.flags() for mine in inputs]
            for part, mine, own, found in zip(self._parts, inputs, sums, noted, strict=True):
                lengths = mine.table["length"]
                vector = part.group.scratch.vector("contribution", int(lengths.sum()))
                where = np.uint64(vector.address) + (4 * (np.cumsum(lengths) - lengths)).astype(np.uint64)
                # The kernel encodes sum + residual, so the rank's contribution takes the place of the residual.
                own.table["next_residual"] = contribute(part, mine, where, found, context, binding)
                own.table["residual"] = where
            device = device_of(self._parts)
            with kernels.together(device) as started:
                for part, own, found in zip(self._parts, sums, noted, strict=True):
                    part.codec.reduce(
                        own.table, received, message, found, context.draw, 1.0, on=device.kernels
                    )
        if not started.done():
            yield started
        with binding.span("reduce"):
            started.finish()
            for mine, found in zip(inputs, noted, strict=True):
                mine.note(found, flags)


def contribute(
    part: Part, mine: ChunkSegments, where: Addresses, found: Bytes, context: StepContext, binding: Binding
) -> Addresses:
    """Write c = scale g + decay r in float32 to the addresses ``where``.

    Returns the addresses of the next residuals, 0 for segments that keep none.
    """
    table, group = mine.table, part.group
    binding.sources(table, mine.layers, group)
    next_residuals = table["next_residual"].copy()
    table["next_residual"] = where
    factors = np.full(len(table), group.scale(context.scale), dtype=np.float32)
    selection.contribute(table, found, factors, decay=group.decay_at(context.rate_ratio))
    table["next_residual"] = next_residuals
    return next_residuals
