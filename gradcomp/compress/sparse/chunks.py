"""ChunkedTopK sends the largest elements of every chunk of a layer, with a residual that may decay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from gradcomp.compress.base import Traits
from gradcomp.compress.bounds import Distortion
from gradcomp.compress.checks import check_flag, check_number, check_whole
from gradcomp.compress.messages import Bytes, Floats
from gradcomp.compress.registry import register
from gradcomp.compress.sparse.base import ByDensity, Sparse
from gradcomp.compress.sparse.payload import Selection, places_of
from gradcomp.core.layers import LayerSpec
from gradcomp.kernels.codec import Group, Sizes, Table
from gradcomp.kernels.segments import DTYPES
from gradcomp.kernels.step import StepContext

_ITEM_BYTES = np.array([dtype.itemsize for dtype in DTYPES], dtype=np.uint64)

#: Selects from the rows of a table: (table, limits, places of the selection, flags, factors).
Select = Callable[[Table, Sizes, Selection, Bytes, Floats], None]


@dataclass(frozen=True, eq=False)
class Chunks:
    """Cut the rows of a table into chunks, and make one selection of a row from those of its chunks.

    ``rows``: the row of each chunk. ``begins``: the chunk with which each row begins. ``starts``: a chunk's first
    element within its row, and ``lengths`` how many it has. ``limits``: how many of them may be selected.
    """

    rows: Sizes
    begins: Sizes
    starts: Sizes
    lengths: Sizes
    limits: Sizes

    @classmethod
    def of(cls, lengths: Sizes, limits: Sizes, chunk: int) -> Chunks:
        """Cut rows into chunks of ``chunk`` elements; the last one of a row may be shorter, a row may be empty.

        Of k elements of a row of n, the chunk from a to b sends floor(k b / n) - floor(k a / n).
        """
        counts = np.maximum(-(-lengths // chunk), 1)
        rows = np.repeat(np.arange(len(lengths)), counts)
        begins = np.cumsum(counts) - counts
        starts = (np.arange(len(rows)) - begins[rows]) * chunk
        ends = np.minimum(starts + chunk, lengths[rows])
        k, n = limits[rows], np.maximum(lengths[rows], 1)
        return cls(rows, begins, starts, ends - starts, k * ends // n - k * starts // n)

    def select(self, select: Select, table: Table, chosen: Selection, flags: Bytes, factors: Floats) -> None:
        """Let ``select`` choose from every chunk; its indices become those of the rows, without gaps between chunks."""
        cut = table[self.rows]
        passed = self.starts.astype(np.uint64)
        for column, size in (("gradient", _ITEM_BYTES[cut["dtype"]]), ("residual", 4), ("next_residual", 4)):
            cut[column] += np.where(cut[column] != 0, passed * size, 0).astype(np.uint64)  # 0: there is none
        cut["start"] += self.starts
        cut["length"] = self.lengths
        own = flags[self.rows]
        offsets = np.cumsum(self.limits) - self.limits
        parts = replace(chosen, offsets=offsets, counts=self.limits.copy())
        select(cut, self.limits, parts, own, factors[self.rows])
        np.maximum.at(flags, self.rows, own)
        chosen.counts[:] = np.add.reduceat(parts.counts, self.begins)
        found, into = places_of(parts), places_of(chosen)
        shift = np.repeat(self.starts, parts.counts).astype(np.uint32)
        chosen.indices[into] = chosen.indices[found] + shift
        chosen.values[into] = chosen.values[found]

    @property
    def least_share(self) -> float:
        """Return the least part of a chunk's elements that may be selected."""
        shares = self.limits[self.lengths > 0] / self.lengths[self.lengths > 0]
        return float(shares.min(initial=1.0))


@register("chunked_topk")
@dataclass(frozen=True)
class ChunkedTopK(ByDensity, Sparse):
    """Send the largest elements of every ``chunk`` consecutive elements of a layer, so that all its parts send.

    p = scale g + ``decay`` e;  of a layer of n elements and k = round(density n), the chunk from element a to b sends
    its floor(k b / n) - floor(k a / n) elements of largest |p|, ties to the lower index;  e' = p - what was sent.

    The level is the density. With a decay below 1 the residual forgets: sums of true and of applied means do not agree
    then. ``zeros``: as in :class:`TopK`; elements of 0 are sent by default, so a payload always has the same size.

    Wire: as :class:`TopK` at the same density: k values and coded indices for every layer, to all ranks, in one round;
    with ``zeros=False`` also a count (4 bytes), and two rounds where the payload grows.
    State: a residual per layer.
    Errors: ConfigError for a density outside (0, 1], a chunk below 1, a decay outside [0, 1], and ``zeros`` that is
    neither true nor false.
    Source: Sarfi et al. 2025 (SparseLoCo). Differs: a chunk's k is rounded so that a layer's k is that of
    its density; a mean is over all ranks, where the released code divides by those that sent the element. On a GPU the
    selected elements pass through the host.
    """

    chunk: int = 4096
    decay: float = 1.0
    zeros: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("chunk", self.chunk, 1, 2**31 - 1)
        check_number("decay", self.decay, "[0, 1]")
        check_flag("zeros", self.zeros)

    @property
    def fixed(self) -> bool:
        return self.zeros

    @cached_property
    def traits(self) -> Traits:
        return replace(super().traits, residual_decay=self.decay)

    def distortion(self, layer: LayerSpec) -> Distortion:
        sent = self.sent_of(layer)
        chunks = Chunks.of(np.array([layer.size]), np.array([sent]), self.chunk)
        return self.distortion_of_largest(sent, layer, chunks.least_share)

    def select(self, group: Group, context: StepContext, chosen: Selection, flags: Bytes) -> None:
        def select(table: Table, limits: Sizes, into: Selection, flags: Bytes, factors: Floats) -> None:
            group.device.kernels.select_top(
                table, flags, factors, limits, *into.arrays, decay=context.decay, zeros=self.zeros
            )

        lengths = group.table["length"].astype(np.int64)
        chunks = group.scratch.once(
            "chunks", lambda: Chunks.of(lengths, self.limits(group.table), self.chunk)
        )
        chunks.select(select, group.inputs, chosen, flags, context.factors(len(group.table)))
