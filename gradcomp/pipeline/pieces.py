"""Pieces of residuals that a bucket works on, as tables of kernels see them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from gradcomp.core.state import Range
from gradcomp.core.vectors import LINE
from gradcomp.kernels.codec import Group, Sizes, Table
from gradcomp.kernels.segments import FLOAT32, SEGMENT


@dataclass(frozen=True, eq=False)
class Pieces:
    """``table``: a row for each piece, float32, with its place in the layer. No two belong to one row of a buffer.

    ``rows``: of the buffer; ``starts``: with which element of its row a piece begins. Copies of all pieces lie one
    behind the other, each from a cache line on: of ``size`` elements in all, piece i from element ``offsets[i]`` on.
    """

    table: Table
    rows: Sizes
    starts: Sizes
    offsets: Sizes = field(init=False)
    size: int = field(init=False)

    def __post_init__(self) -> None:
        lengths = -(-self.table["length"].astype(np.int64) // LINE) * LINE
        object.__setattr__(self, "offsets", np.cumsum(lengths) - lengths)
        object.__setattr__(self, "size", int(lengths.sum()))

    @staticmethod
    def of_groups(groups: Sequence[Group]) -> Pieces:
        """First residuals of the groups that have feedback; a row is a layer."""
        kept = [group for group in groups if group.feedback]
        rows = np.concatenate([np.zeros(0, np.int64), *(group.layers for group in kept)])
        # Blocks of a layer follow one another: they are one piece.
        first = np.flatnonzero(np.diff(rows, prepend=-1))
        table = _float32(len(first))
        if len(first):
            segments = np.concatenate([group.table for group in kept])
            table["start"], table["layer"] = segments["start"][first], segments["layer"][first]
            table["length"] = np.add.reduceat(segments["length"], first)
        return Pieces(table, rows[first], table["start"].astype(np.int64))

    @staticmethod
    def of_ranges(ranges: Sequence[Range], rows: Sequence[int], groups: Sequence[Group]) -> Pieces:
        """Second residuals of ranges of the groups' layers; a range is a row, whole."""
        hashes = {
            layer: number
            for group in groups
            for layer, number in zip(group.layers.tolist(), group.table["layer"].tolist(), strict=True)
        }
        table = _float32(len(ranges))
        table["start"] = [r.start for r in ranges]
        table["length"] = [r.length for r in ranges]
        table["layer"] = [hashes[r.layer] for r in ranges]
        return Pieces(table, np.array(rows, dtype=np.int64), np.zeros(len(ranges), dtype=np.int64))

    def bases(self, count: int, address: int) -> npt.NDArray[np.uint64]:
        """Of ``count`` rows, where element 0 would lie beside copies that begin at ``address``; 0 without a piece."""
        bases = np.zeros(count, dtype=np.uint64)
        # A piece that does not begin its row may give an address below the first: wrapping adds up.
        bases[self.rows] = np.uint64(address) + (4 * (self.offsets - self.starts)).astype(np.uint64)
        return bases


def _float32(rows: int) -> Table:
    table = np.zeros(rows, dtype=SEGMENT)
    table["bucket_size"], table["dtype"] = 1, FLOAT32
    return table
