"""The low-rank kernels on a GPU; :mod:`gradcomp.kernels.reference_lowrank` defines what each computes.

P and Q may lie on either side. What `project` and `back_project` sum up is in an order of its own, the same in every
run; the rest gives the reference's bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gradcomp.kernels.cuda.call import GROUP, THREADS, Call, Parameter, tiles
from gradcomp.kernels.cuda.driver import Driver
from gradcomp.kernels.cuda.spans import described, read_span, write_span
from gradcomp.kernels.segments import (
    FLOAT64,
    MAX_ELEMENTS,
    SEGMENT,
    Bytes,
    SegmentTable,
    check_array,
    check_elements,
)

Floats = npt.NDArray[np.float32]
Int64s = npt.NDArray[np.int64]

RANKS = (4, 8, 16, 32)
"""What project.cu is compiled for: so many columns of P and Q at a time."""

_WARPS = THREADS // 32
_CHUNK_COLUMNS = 1024  # of a tile, as in matrices.cuh
_ROWS = 4  # that a thread takes at a time, of P Q^T
_PROJECT_ROWS = {4: 4, 8: 4, 16: 2, 32: 2}  # and of M Q
_BACK_COLUMNS = {4: 4, 8: 4, 16: 2, 32: 2}  # columns that a lane takes of M^T P
_BACK_ROWS = {4: 256, 8: 256, 16: 512, 32: 512}  # and rows that a warp does; the more, the smaller the parts
_MANY_PARTS = 64
_ORTHOGONALISERS = 512  # threads of a block of orthogonalise.cu


class LowRankKernels:
    """project, back_project, orthogonalise, expand and subtract."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def project(
        self,
        table: SegmentTable,
        flags: Bytes,
        factors: Floats,
        rows: Int64s,
        columns: Int64s,
        ranks: Int64s,
        q: Floats,
        q_at: Int64s,
        p: Floats,
        p_at: Int64s,
        *,
        decay: float,
    ) -> None:
        """See `lowrank.project`."""
        check_array("flags", flags, np.uint8, len(table), writable=True)
        check_array("factors", factors, np.float32, len(table))
        check_array("p", described(p), np.float32, writable=True)
        layers = _checked(table, rows, columns, ranks, p, p_at, q, q_at)
        call = Call(self._driver)
        found = np.zeros(len(table), dtype=np.uint8)
        bad, scales = call.result(found, zero=True), call.give(factors)
        given = read_span(call, q, layers.q_at, layers.columns * layers.ranks)
        written = write_span(call, p, layers.p_at, layers.rows * layers.ranks)
        chunks = -(-layers.columns // _CHUNK_COLUMNS)
        sums = _Sums(call, layers, layers.rows, layers.p_at, chunks)
        lanes = _lanes(layers.columns, 4)
        for most, members in _by_rank(layers):
            part = layers.only(members)
            stacked = _WARPS * (32 // lanes[members]) * _PROJECT_ROWS[most]
            work = part.give(call, lanes[members], chunks[members], sums.begins[members])
            blocks, tiling = _tiling(call, -(-part.rows // stacked) * chunks[members])
            call.launch(
                "project.cu",
                "project",
                blocks,
                *(*work, *tiling, scales, bad, given, sums.room, float(decay)),
                defines={"GRADCOMP_RANKS": most},
            )
        sums.add(written, bad)
        call.run()
        flags |= found

    def back_project(
        self,
        table: SegmentTable,
        rows: Int64s,
        columns: Int64s,
        ranks: Int64s,
        p: Floats,
        p_at: Int64s,
        q: Floats,
        q_at: Int64s,
    ) -> None:
        """See `lowrank.back_project`."""
        check_array("q", described(q), np.float32, writable=True)
        layers = _checked(table, rows, columns, ranks, p, p_at, q, q_at)
        call = Call(self._driver)
        given = read_span(call, p, layers.p_at, layers.rows * layers.ranks)
        written = write_span(call, q, layers.q_at, layers.columns * layers.ranks)
        classes = _by_rank(layers)
        chunks = np.zeros(len(table), dtype=np.int64)
        for most, members in classes:
            chunks[members] = -(-layers.rows[members] // _BACK_ROWS[most])
        sums = _Sums(call, layers, layers.columns, layers.q_at, chunks)
        for most, members in classes:
            part = layers.only(members)
            lanes = _lanes(part.columns, _BACK_COLUMNS[most])
            work = part.give(call, lanes, chunks[members], sums.begins[members])
            units = -(-part.columns // (lanes * _BACK_COLUMNS[most])) * chunks[members]
            blocks, tiling = _tiling(call, -(-units // _WARPS))
            call.launch(
                "project.cu",
                "back_project",
                blocks,
                *(*work, *tiling, _BACK_ROWS[most], given, sums.room),
                defines={"GRADCOMP_RANKS": most},
            )
        sums.add(written, 0)
        call.run()

    def orthogonalise(self, rows: Int64s, ranks: Int64s, p: Floats, p_at: Int64s) -> None:
        """See `lowrank.orthogonalise`."""
        check_array("p", described(p), np.float32, writable=True)
        for name, array in (("rows", rows), ("ranks", ranks), ("p_at", p_at)):
            check_array(name, array, np.int64, len(rows))
        _check_factor("P", p_at, rows, ranks, len(p))
        chosen = np.flatnonzero((rows > 0) & (ranks > 0))
        rows, ranks, p_at = rows[chosen], ranks[chosen], p_at[chosen]
        call = Call(self._driver)
        written = write_span(call, p, p_at, rows * ranks, reads=True)
        begins = np.cumsum(ranks) - ranks  # of the columns of each, among all
        owners = np.repeat(np.arange(len(rows)), ranks)
        lengths = rows[owners]
        places = p_at[owners] + (np.arange(len(owners)) - begins[owners]) * lengths
        largest = call.room(4 * len(owners), zero=True)
        blocks, tiling = _tiling(call, -(-lengths // (THREADS * GROUP)))
        columns = call.give(np.stack((places, lengths), axis=1))
        call.launch("orthogonalise.cu", "largest_magnitudes", blocks, columns, *tiling, written, largest)
        matrices = call.give(np.stack((p_at, rows, ranks, begins), axis=1))
        call.launch(
            "orthogonalise.cu",
            "orthogonalise",
            len(rows),
            matrices,
            written,
            largest,
            threads=_ORTHOGONALISERS,
        )
        call.run()

    def expand(
        self,
        table: SegmentTable,
        flags: Bytes,
        rows: Int64s,
        columns: Int64s,
        ranks: Int64s,
        p: Floats,
        p_at: Int64s,
        q: Floats,
        q_at: Int64s,
        *,
        divisor: float,
        scale: float,
    ) -> None:
        """See `lowrank.expand`."""
        check_array("flags", flags, np.uint8, len(table), writable=True)
        layers = _checked(table, rows, columns, ranks, p, p_at, q, q_at, outputs=True)
        call = Call(self._driver)
        found = np.zeros(len(table), dtype=np.uint8)
        marks = (call.give(flags), call.result(found, zero=True))
        _launch_product(call, "expand", layers, p, q, *marks, float(divisor), float(scale))
        call.run()
        flags |= found

    def subtract(
        self,
        table: SegmentTable,
        rows: Int64s,
        columns: Int64s,
        ranks: Int64s,
        p: Floats,
        p_at: Int64s,
        q: Floats,
        q_at: Int64s,
    ) -> None:
        """See `lowrank.subtract`."""
        layers = _checked(table, rows, columns, ranks, p, p_at, q, q_at)
        call = Call(self._driver)
        _launch_product(call, "subtract", layers, p, q, 0, 0, 1.0, 1.0)
        call.run()


@dataclass(frozen=True)
class _Layers:
    """The rows that a call works on, column by column; `index` is their place in the whole table."""

    index: Int64s
    table: SegmentTable
    rows: Int64s
    columns: Int64s
    ranks: Int64s
    p_at: Int64s
    q_at: Int64s

    def only(self, members: Int64s) -> _Layers:
        return _Layers(*(column[members] for column in vars(self).values()))

    def give(
        self, call: Call, lanes: Int64s, chunks: Int64s, parts_at: Int64s
    ) -> tuple[Parameter, Parameter]:
        """The segments, and what matrices.cuh calls a Layer of each."""
        numbers = (self.index, self.rows, self.columns, self.ranks, self.p_at, self.q_at)
        columns = (*numbers, lanes, chunks, parts_at)
        return call.give(self.table), call.give(np.stack(columns, axis=1).astype(np.int64))


class _Sums:
    """Room for what blocks have summed up, and its sum."""

    def __init__(self, call: Call, layers: _Layers, lengths: Int64s, places: Int64s, parts: Int64s) -> None:
        sizes = lengths * layers.ranks
        ends = np.cumsum(sizes * parts)
        self.begins: Int64s = ends - sizes * parts
        self.room = call.room(4 * int(ends[-1]) if len(ends) else 0)
        self._call = call
        self._per_element = np.where(parts > _MANY_PARTS, 32, 1)
        self._sizes = sizes
        self._table = np.stack((layers.index, sizes, places, parts, self.begins, self._per_element), axis=1)

    def add(self, result: Parameter, bad: Parameter) -> None:
        blocks, tiling = _tiling(self._call, -(-self._sizes * self._per_element // THREADS))
        table = self._call.give(self._table)
        self._call.launch("project.cu", "add_parts", blocks, table, *tiling, self.room, result, bad)


def _launch_product(
    call: Call, name: str, layers: _Layers, p: Floats, q: Floats, *parameters: Parameter
) -> None:
    lanes = _lanes(layers.columns, 4)
    chunks = -(-layers.columns // _CHUNK_COLUMNS)
    stacked = _WARPS * (32 // lanes) * _ROWS
    blocks, tiling = _tiling(call, -(-layers.rows // stacked) * chunks)
    factors = (
        read_span(call, p, layers.p_at, layers.rows * layers.ranks),
        read_span(call, q, layers.q_at, layers.columns * layers.ranks),
    )
    work = layers.give(call, lanes, chunks, np.zeros_like(chunks))
    call.launch("expand.cu", name, blocks, *work, *tiling, *factors, *parameters)


def _tiling(call: Call, counts: Int64s) -> tuple[int, tuple[Parameter, int]]:
    """Blocks for so many tiles per row, and how kernels find a block's row."""
    begins = tiles(counts)
    return int(begins[-1]), (call.give(begins), len(counts))


def _lanes(columns: Int64s, width: int) -> Int64s:
    """Lanes of a warp, a power of two, that take so many columns each."""
    lanes: Int64s = np.int64(1) << np.searchsorted(width * 2 ** np.arange(5), columns)
    return lanes


def _by_rank(layers: _Layers) -> list[tuple[int, Int64s]]:
    """The rows for each of RANKS."""
    kinds = np.minimum(np.searchsorted(RANKS, layers.ranks), len(RANKS) - 1)
    found = [(most, np.flatnonzero(kinds == kind)) for kind, most in enumerate(RANKS)]
    return [(most, members) for most, members in found if len(members)]


# --- checks -------------------------------------------------------------------------------------------------


def _checked(
    table: SegmentTable,
    rows: Int64s,
    columns: Int64s,
    ranks: Int64s,
    p: Any,
    p_at: Int64s,
    q: Any,
    q_at: Int64s,
    *,
    outputs: bool = False,
) -> _Layers:
    """The layers of a call, or those with an output, all of which fit together."""
    check_array("table", table, SEGMENT)
    check_array("p", described(p), np.float32)
    check_array("q", described(q), np.float32)
    vectors = {"rows": rows, "columns": columns, "ranks": ranks, "p_at": p_at, "q_at": q_at}
    for name, vector in vectors.items():
        check_array(name, vector, np.int64, len(table))
    index = np.flatnonzero(table["output"]) if outputs else np.arange(len(table))
    layers = _Layers(index, table[index], *(vector[index] for vector in vectors.values()))
    length, n, m = layers.table["length"], layers.rows, layers.columns
    check_elements(layers.table)
    _require(layers.table["dtype"] != FLOAT64, index, "low rank has no float64")
    if not outputs:
        held = (length == 0) | (layers.table["shadow"] != 0)
        _require(held, index, "no shadow to hold the matrix")
    # A quotient first: the product of hostile numbers could wrap.
    sensible = (n >= 0) & (m >= 0) & (n <= MAX_ELEMENTS) & (m <= MAX_ELEMENTS)
    sensible &= n <= MAX_ELEMENTS // np.maximum(m, 1)
    product = np.where(sensible, n, 0) * np.where(sensible, m, 0)
    complaint = "rows times columns is not the length of the segment"
    _require(sensible & (product == length), index, complaint)
    _check_factor("P", layers.p_at, n, layers.ranks, len(p), index)
    _check_factor("Q", layers.q_at, m, layers.ranks, len(q), index)
    return layers


def _check_factor(
    name: str, at: Int64s, lengths: Int64s, counts: Int64s, size: int, index: Int64s | None = None
) -> None:
    inside = (at >= 0) & (at <= size) & (lengths >= 0) & (counts >= 0)
    room = (size - np.where(inside, at, 0)) // np.maximum(lengths, 1)
    inside &= (lengths == 0) | (counts <= room)
    _require(inside, np.arange(len(at)) if index is None else index, f"{name} does not lie inside its array")


def _require(condition: npt.NDArray[np.bool_], index: Int64s, complaint: str) -> None:
    if not condition.all():
        raise ValueError(f"segment {index[np.argmin(condition)]}: {complaint}")
