"""Writes down the calls of the low-rank kernels; the numbers of a run are those of :mod:`.lowrank`.

A call takes the arrays of a run, and columns of numbers: n, m and r of every layer, and where P and Q begin.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gradcomp.kernels.cuda.call import GROUP, THREADS, Call, spans, tiles, to_read, to_write
from gradcomp.kernels.cuda.layout import Parameter, Real, Ref, Source
from gradcomp.kernels.cuda.prepared import source_of
from gradcomp.kernels.reference_memory import CHUNK
from gradcomp.kernels.segments import FLOAT64, MAX_ELEMENTS, Floats, SegmentTable, Sizes, check_elements

RANKS = (4, 8, 16, 32)
"""The numbers of columns of P and Q that project.cu is compiled for."""

_WARPS = THREADS // 32
_CHUNK_COLUMNS = 1024  # columns of a tile, as in matrices.cuh
_ROWS = 4  # rows of P Q^T that a thread computes at a time
_PROJECT_ROWS = {4: 4, 8: 4, 16: 2, 32: 2}  # rows of M Q that a thread computes at a time
_BACK_COLUMNS = {4: 4, 8: 4, 16: 2, 32: 2}  # columns of M that a lane takes in M^T P
# Rows of M that a warp takes in M^T P; more rows mean fewer parts.
_BACK_ROWS = {4: 256, 8: 256, 16: 512, 32: 512}
_MANY_PARTS = 64
_ORTHOGONALISERS = 512  # threads of a block of orthogonalise.cu
_BLOCKS_OF_A_MATRIX = 64  # the most blocks that share the chunks of a matrix

_TABLE, _P, _Q, _FOUND, _OTHER = range(5)
_COPY = _FOUND

Arrays = tuple[Any, ...]
Columns = tuple[Sizes, ...]


def write_project(call: Call, arrays: Arrays, columns: Columns, low: Sizes | None = None) -> None:
    """Writes down project, of all rows of a table or of some."""
    table, p, q, found, factors = arrays
    layers = _checked(table, low, columns, len(p), len(q))
    bad = call.result(found, Source(_FOUND), zero=True)
    scales = call.give(factors, Source(_OTHER))
    given = to_read(call, q, _Q, layers.q_at, layers.columns * layers.ranks)
    written = to_write(call, p, _P, layers.p_at, layers.rows * layers.ranks)
    chunks = -(-layers.columns // _CHUNK_COLUMNS)
    sums = _Sums(call, layers, layers.rows, layers.p_at, chunks)
    lanes = _lanes(layers.columns, 4)
    for most, members in _by_rank(layers):
        part = layers.only(members)
        stacked = _WARPS * (32 // lanes[members]) * _PROJECT_ROWS[most]
        work = part.give(call, table, lanes[members], chunks[members], sums.begins[members])
        blocks, tiling = _tiling(call, -(-part.rows // stacked) * chunks[members])
        call.launch(
            "project.cu",
            "project",
            blocks,
            *(*work, *tiling, scales, bad, given, sums.workspace, Real(0)),
            defines={"GRADCOMP_RANKS": most},
        )
    sums.add(written, 0, bad)


def write_back_project(call: Call, arrays: Arrays, columns: Columns, low: Sizes | None = None) -> None:
    """Writes down back_project, of all rows of a table or of some."""
    table, p, q, copy = arrays
    layers = _checked(table, low, columns, len(p), len(q) if copy is None else min(len(q), len(copy)))
    given = to_read(call, p, _P, layers.p_at, layers.rows * layers.ranks)
    sizes = layers.columns * layers.ranks
    written = to_write(call, q, _Q, layers.q_at, sizes)
    copied = 0 if copy is None else to_write(call, copy, _COPY, layers.q_at, sizes)
    classes = _by_rank(layers)
    chunks = np.zeros(len(layers.index), dtype=np.int64)
    for most, members in classes:
        chunks[members] = -(-layers.rows[members] // _BACK_ROWS[most])
    sums = _Sums(call, layers, layers.columns, layers.q_at, chunks)
    for most, members in classes:
        part = layers.only(members)
        lanes = _lanes(part.columns, _BACK_COLUMNS[most])
        work = part.give(call, table, lanes, chunks[members], sums.begins[members])
        units = -(-part.columns // (lanes * _BACK_COLUMNS[most])) * chunks[members]
        blocks, tiling = _tiling(call, -(-units // _WARPS))
        call.launch(
            "project.cu",
            "back_project",
            blocks,
            *(*work, *tiling, _BACK_ROWS[most], given, sums.workspace),
            defines={"GRADCOMP_RANKS": most},
        )
    sums.add(written, copied, 0)


def write_orthogonalise(call: Call, p: Floats, columns: Columns) -> None:
    """Writes down orthogonalise, of a run's first array."""
    rows, ranks, p_at = columns
    _check_factor("P", p_at, rows, ranks, len(p))
    chosen = np.flatnonzero((rows > 0) & (ranks > 0))
    rows, ranks, p_at = rows[chosen], ranks[chosen], p_at[chosen]
    written = call.change(p, 0, spans(4 * p_at, 4 * rows * ranks))
    begins = np.cumsum(ranks) - ranks  # of the columns of each, among all
    _, _, largest = _largest(call, written, rows, ranks, p_at)
    chunks = -(-rows // CHUNK)
    sizes = np.where(chunks > 1, (2 + 2 * ranks) * chunks, 0)
    sums, turns = call.workspace(8 * int(sizes.sum())), call.workspace(16 * len(rows), zero=True)
    matrices = call.give(np.stack((p_at, rows, ranks, begins, np.cumsum(sizes) - sizes), axis=1))
    blocks, tiling = _tiling(call, np.minimum(chunks, _BLOCKS_OF_A_MATRIX))
    call.launch(
        "orthogonalise.cu",
        "orthogonalise",
        blocks,
        *(matrices, *tiling, written, largest, sums, turns),
        threads=_ORTHOGONALISERS,
    )


def _largest(
    call: Call, factor: Parameter, sides: Sizes, ranks: Sizes, at: Sizes
) -> tuple[int, tuple[Parameter, int], Ref]:
    """Launches the search for the largest magnitude of each column; returns it, and the tiling of all columns."""
    (places,), lengths = _columns(sides, ranks, at)
    blocks, tiling = _tiling(call, -(-lengths // (THREADS * GROUP)))
    largest = call.workspace(4 * len(lengths), zero=True)
    work = call.give(np.stack((places, lengths), axis=1))
    call.launch("orthogonalise.cu", "largest_magnitudes", blocks, work, *tiling, factor, largest)
    return blocks, tiling, largest


def _columns(sides: Sizes, ranks: Sizes, *at: Sizes) -> tuple[list[Sizes], Sizes]:
    """Returns the beginnings of the factors' columns in each array, and their lengths."""
    owners = np.repeat(np.arange(len(sides)), ranks)
    lengths = sides[owners]
    within = (np.arange(len(owners)) - (np.cumsum(ranks) - ranks)[owners]) * lengths
    return [each[owners] + within for each in at], lengths


def write_keep(call: Call, arrays: Arrays, columns: Columns) -> None:
    """Writes down keep, from a run's first array to its second."""
    factor, kept = arrays
    sides, ranks, at, before, after = columns
    for name, begins, array in (("factor", at, factor), ("before", before, kept), ("after", after, kept)):
        _check_factor(name, begins, sides, ranks, len(array))
    sizes = sides * ranks
    written = call.change(kept, 1, spans(4 * after, 4 * sizes))
    to_read(call, kept, 1, before, sizes)
    given = to_read(call, factor, 0, at, sizes)
    blocks, tiling, largest = _largest(call, given, sides, ranks, at)
    places, lengths = _columns(sides, ranks, at, before, after)
    work = call.give(np.stack((*places, lengths), axis=1))
    call.launch("orthogonalise.cu", "keep", blocks, work, *tiling, given, written, largest)


def write_expand(call: Call, arrays: Arrays, columns: Columns, low: Sizes | None = None) -> None:
    """Writes down expand, of all rows of a table or of some."""
    table, p, q, found, flags = arrays
    layers = _checked(table, low, columns, len(p), len(q), outputs=True)
    marks = call.give(flags, Source(_OTHER)), call.result(found, Source(_FOUND), zero=True)
    _launch_product(call, "expand", layers, arrays, *marks, Real(0), Real(1))


def write_subtract(call: Call, arrays: Arrays, columns: Columns, low: Sizes | None = None) -> None:
    """Writes down subtract, of all rows of a table or of some."""
    table, p, q = arrays
    _launch_product(call, "subtract", _checked(table, low, columns, len(p), len(q)), arrays, 0, 0, 1.0, 1.0)


@dataclass(frozen=True)
class _Layers:
    """The rows that a call works on, column by column; `index` is their place in the whole table."""

    index: Sizes
    table: SegmentTable
    rows: Sizes
    columns: Sizes
    ranks: Sizes
    p_at: Sizes
    q_at: Sizes

    def only(self, members: Sizes) -> _Layers:
        return _Layers(*(column[members] for column in vars(self).values()))

    def give(
        self, call: Call, table: SegmentTable, lanes: Sizes, chunks: Sizes, parts_at: Sizes
    ) -> tuple[Parameter, Parameter]:
        """Registers the segments, and each one's Layer of matrices.cuh."""
        numbers = (self.index, self.rows, self.columns, self.ranks, self.p_at, self.q_at)
        columns = np.stack((*numbers, lanes, chunks, parts_at), axis=1).astype(np.int64)
        return call.give(self.table, source_of(_TABLE, self.index, len(table))), call.give(columns)


class _Sums:
    """The memory for the blocks' partial sums, and the launch that adds these up."""

    def __init__(self, call: Call, layers: _Layers, lengths: Sizes, places: Sizes, parts: Sizes) -> None:
        sizes = lengths * layers.ranks
        ends = np.cumsum(sizes * parts)
        self.begins: Sizes = ends - sizes * parts
        self.workspace = call.workspace(4 * int(ends[-1]) if len(ends) else 0)
        self._call = call
        self._per_element = np.where(parts > _MANY_PARTS, 32, 1)
        self._sizes = sizes
        self._table = np.stack((layers.index, sizes, places, parts, self.begins, self._per_element), axis=1)

    def add(self, result: Parameter, copy: Parameter, bad: Parameter) -> None:
        blocks, tiling = _tiling(self._call, -(-self._sizes * self._per_element // THREADS))
        table = self._call.give(self._table)
        self._call.launch(
            "project.cu", "add_parts", blocks, table, *tiling, self.workspace, result, copy, bad
        )


def _launch_product(call: Call, name: str, layers: _Layers, arrays: Arrays, *parameters: Parameter) -> None:
    table, p, q = arrays[:3]
    lanes = _lanes(layers.columns, 4)
    chunks = -(-layers.columns // _CHUNK_COLUMNS)
    stacked = _WARPS * (32 // lanes) * _ROWS
    blocks, tiling = _tiling(call, -(-layers.rows // stacked) * chunks)
    factors = (
        to_read(call, p, _P, layers.p_at, layers.rows * layers.ranks),
        to_read(call, q, _Q, layers.q_at, layers.columns * layers.ranks),
    )
    work = layers.give(call, table, lanes, chunks, np.zeros_like(chunks))
    call.launch("expand.cu", name, blocks, *work, *tiling, *factors, *parameters)


def _tiling(call: Call, counts: Sizes) -> tuple[int, tuple[Parameter, int]]:
    """Returns the blocks for ``counts`` tiles per row, and the parameters by which kernels find a block's row."""
    begins = tiles(counts)
    return int(begins[-1]), (call.give(begins), len(counts))


def _lanes(columns: Sizes, width: int) -> Sizes:
    """Returns the lanes of a warp, a power of two, whose threads take ``width`` columns each."""
    lanes: Sizes = np.int64(1) << np.searchsorted(width * 2 ** np.arange(5), columns)
    return lanes


def _by_rank(layers: _Layers) -> list[tuple[int, Sizes]]:
    """Returns the rows that each of RANKS serves."""
    kinds = np.minimum(np.searchsorted(RANKS, layers.ranks), len(RANKS) - 1)
    found = [(most, np.flatnonzero(kinds == kind)) for kind, most in enumerate(RANKS)]
    return [(most, members) for most, members in found if len(members)]


# --- checks -------------------------------------------------------------------------------------------------


def _checked(
    table: SegmentTable,
    low: Sizes | None,
    columns: Columns,
    p_size: int,
    q_size: int,
    *,
    outputs: bool = False,
) -> _Layers:
    """Returns the checked layers of a call: ``low`` or all rows, or those of them with an output."""
    index = np.arange(len(table)) if low is None else low
    vectors = [index, *columns]
    if outputs:
        chosen = table["output"][index] != 0
        vectors = [vector[chosen] for vector in vectors]
    index = vectors[0]
    layers = _Layers(index, table[index], *vectors[1:])
    length, n, m = layers.table["length"], layers.rows, layers.columns
    check_elements(layers.table)
    require(layers.table["dtype"] != FLOAT64, index, "low rank has no float64")
    # Compared as a quotient: the product of hostile numbers could wrap.
    sensible = (n >= 0) & (m >= 0) & (n <= MAX_ELEMENTS) & (m <= MAX_ELEMENTS)
    sensible &= n <= MAX_ELEMENTS // np.maximum(m, 1)
    product = np.where(sensible, n, 0) * np.where(sensible, m, 0)
    complaint = "rows times columns is not the length of the segment"
    require(sensible & (product == length), index, complaint)
    _check_factor("P", layers.p_at, n, layers.ranks, p_size, index)
    _check_factor("Q", layers.q_at, m, layers.ranks, q_size, index)
    return layers


def _check_factor(
    name: str, at: Sizes, lengths: Sizes, counts: Sizes, size: int, index: Sizes | None = None
) -> None:
    inside = (at >= 0) & (at <= size) & (lengths >= 0) & (counts >= 0)
    capacity = (size - np.where(inside, at, 0)) // np.maximum(lengths, 1)
    inside &= (lengths == 0) | (counts <= capacity)
    require(inside, np.arange(len(at)) if index is None else index, f"{name} does not lie inside its array")


def require(condition: npt.NDArray[np.bool_], index: Sizes, complaint: str) -> None:
    """Raises ValueError for the first layer, by its index, that does not fulfil a condition."""
    if not condition.all():
        raise ValueError(f"segment {index[np.argmin(condition)]}: {complaint}")
