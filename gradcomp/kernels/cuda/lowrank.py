"""The low-rank kernels on a GPU; :mod:`gradcomp.kernels.reference_lowrank` defines them.

P and Q may lie on either side. `project` and `back_project` sum in an order of their own, the same in every run; the
other kernels give the reference's bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gradcomp.kernels.cuda.call import described
from gradcomp.kernels.cuda.factors import (
    require,
    write_back_project,
    write_expand,
    write_keep,
    write_orthogonalise,
    write_project,
    write_subtract,
)
from gradcomp.kernels.cuda.prepared import Kernels, fixed_columns, place_of
from gradcomp.kernels.cuda.vectors import DeviceVector
from gradcomp.kernels.segments import (
    SEGMENT,
    Bytes,
    Factor,
    Floats,
    SegmentTable,
    Shapes,
    Sizes,
    check_array,
    is_table,
)


class LowRankKernels(Kernels):
    """The kernels of `reference_lowrank` under the same names; recorded once while the layers do not change."""

    def project(
        self,
        table: SegmentTable,
        flags: Bytes,
        factors: Floats,
        shapes: Shapes,
        q: Factor,
        p: Factor,
        *,
        decay: float,
    ) -> None:
        check_array("flags", flags, np.uint8, len(table), writable=True)
        check_array("factors", factors, np.float32, len(table))
        columns = (*shapes, p.at, q.at)
        found = np.zeros(len(table), dtype=np.uint8)
        arrays = (table, p.values, q.values, found, factors)
        key = ("project", _key(table, columns), _factor("p", p.values, writable=True), _factor("q", q.values))
        check_next_residuals(table)
        self._plans.run(
            key, lambda call: write_project(call, arrays, columns), arrays, (float(decay),), (flags, found)
        )

    def back_project(self, table: SegmentTable, shapes: Shapes, p: Factor, q: Factor) -> None:
        columns = (*shapes, p.at, q.at)
        arrays = (table, p.values, q.values, None)
        factors = _factor("p", p.values), _factor("q", q.values, writable=True)
        key = ("back_project", _key(table, columns), *factors)
        check_next_residuals(table)
        self._plans.run(key, lambda call: write_back_project(call, arrays, columns), arrays)

    def orthogonalise(self, rows: Sizes, ranks: Sizes, p: Factor) -> None:
        columns = (rows, ranks, p.at)
        key = ("orthogonalise", *_bytes(len(rows), columns), _factor("p", p.values, writable=True))
        self._plans.run(key, lambda call: write_orthogonalise(call, p.values, columns), (p.values,))

    def expand(
        self,
        table: SegmentTable,
        flags: Bytes,
        shapes: Shapes,
        p: Factor,
        q: Factor,
        *,
        divisor: float,
        scale: float,
    ) -> None:
        check_array("flags", flags, np.uint8, len(table), writable=True)
        columns = (*shapes, p.at, q.at)
        found = np.zeros(len(table), dtype=np.uint8)
        arrays = (table, p.values, q.values, found, flags)
        with_output = table["output"] != 0 if is_table(table) else None
        key = (
            *("expand", _key(table, columns), _factor("p", p.values), _factor("q", q.values)),
            None if with_output is None or with_output.all() else with_output.tobytes(),
        )
        numbers = (float(divisor), float(scale))
        self._plans.run(
            key, lambda call: write_expand(call, arrays, columns), arrays, numbers, (flags, found)
        )

    def subtract(self, table: SegmentTable, shapes: Shapes, p: Factor, q: Factor) -> None:
        columns = (*shapes, p.at, q.at)
        arrays = (table, p.values, q.values)
        key = ("subtract", _key(table, columns), _factor("p", p.values), _factor("q", q.values))
        check_next_residuals(table)
        self._plans.run(key, lambda call: write_subtract(call, arrays, columns), arrays)

    def keep(
        self, sides: Sizes, ranks: Sizes, factor: Factor, kept: Floats, before: Sizes, after: Sizes
    ) -> None:
        columns = (sides, ranks, factor.at, before, after)
        given = _factor("factor", factor.values), _factor("kept", kept, writable=True)
        arrays = (factor.values, kept)
        key = ("keep", *_bytes(len(sides), columns), *given)
        self._plans.run(key, lambda call: write_keep(call, arrays, columns), arrays)


def check_next_residuals(table: SegmentTable) -> None:
    """Raises ValueError for a layer without next residual; every run checks it, as addresses change from run to run."""
    if not table["next_residual"].all():
        held = (table["length"] == 0) | (table["next_residual"] != 0)
        require(held, np.arange(len(table)), "no next residual to hold the matrix")


def _key(table: SegmentTable, columns: Sequence[Sizes]) -> tuple[Any, ...]:
    """Returns the part of a call's key that describes its layers."""
    check_array("table", table, SEGMENT)
    return fixed_columns(table), *_bytes(len(table), columns)


def _bytes(count: int, vectors: Sequence[Sizes]) -> list[bytes]:
    for vector in vectors:
        if not (
            type(vector) is np.ndarray
            and vector.dtype == np.int64
            and vector.shape == (count,)
            and vector.flags.c_contiguous
        ):
            check_array("a column of numbers", vector, np.int64, count)
    return [vector.tobytes() for vector in vectors]


def _factor(name: str, array: Any, *, writable: bool = False) -> tuple[int, str]:
    """Checks P or Q, as every run does, and returns its part of the call's key."""
    if not isinstance(array, DeviceVector):
        check_array(
            name, array if isinstance(array, np.ndarray) else described(array), np.float32, writable=writable
        )
    return place_of(array)
