"""Sums that travel: a rank decodes what arrives, adds its own contribution and encodes the sum."""

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
    """The parts as their partial sums travel.

    Of a fixed size each. What is to be exact travels as float32: bfloat16 holds the gradients, not their sums.
    ConfigError for votes, which say nothing unless they are counted all at once.
    """
    for part in parts:
        if part.codec.kind == VOTE:
            partial = with_partial_sums()
            others = ", ".join(name for name in names() if name not in partial)
            raise ConfigError(
                f"{part.group.compressor.name} takes a majority of all ranks, of which {', '.join(partial)} make "
                f"partial sums; it works with the reductions {others}"
            )
    return [
        Part(Codec(FP32), part.group, part.header_index)
        if part.codec.kind == BF16 and part.group.compressor.traits.exact
        else part
        for part in fixed(parts)
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
        self,
        j: int,
        received: Sequence[Bytes],
        message: Bytes,
        context: StepContext,
        binding: Binding,
        flags: BucketFlags,
    ) -> Waits[None]:
        """Add this rank's contribution to the codes of chunk j, in order; say what turns out not to be finite."""
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
                # To the kernel, what the rank adds is the residual of the sum.
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
    """c = scale g + decay r, in float32, at these addresses; returns those of the next residuals, 0 if none is kept."""
    table, group = mine.table, part.group
    binding.sources(table, mine.layers, group)
    next_residuals = table["next_residual"].copy()
    table["next_residual"] = where
    factors = np.full(len(table), group.scale(context.scale), dtype=np.float32)
    selection.contribute(table, found, factors, decay=group.decay_at(context.rate_ratio))
    table["next_residual"] = next_residuals
    return next_residuals
