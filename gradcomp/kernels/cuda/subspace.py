"""Subspace iteration on a GPU: each step of :mod:`gradcomp.kernels.subspace` is one prepared call."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from gradcomp.kernels.cuda import codec
from gradcomp.kernels.cuda.call import Call
from gradcomp.kernels.cuda.driver import Driver
from gradcomp.kernels.cuda.lowrank import (
    check_next_residuals,
    write_back_project,
    write_expand,
    write_keep,
    write_orthogonalise,
    write_project,
    write_subtract,
)
from gradcomp.kernels.cuda.prepared import Plans, place_of
from gradcomp.kernels.segments import FP32, Bytes, SegmentTable

Floats = npt.NDArray[np.float32]
Int64s = npt.NDArray[np.int64]


class SubspaceKernels:
    """project, iterate and finish of :mod:`gradcomp.kernels.subspace`, whose `Layers` stand for all that stays."""

    def __init__(self, driver: Driver, plans: Plans) -> None:
        self._plans = plans

    def subspace_project(
        self,
        layers: Any,
        table: SegmentTable,
        flags: Bytes,
        factors: Floats,
        q: Floats,
        q_at: Int64s,
        message: Floats,
        *,
        scale: float,
        decay: float,
    ) -> None:
        """See `subspace.project`."""
        check_next_residuals(table)
        found = np.zeros((2, len(table)), dtype=np.uint8)
        arrays = (table, message, q, found[0], factors, found[1])
        numbers = (decay, 0, 0, 0, scale, decay, 1.0)

        def write_down(call: Call) -> None:
            shapes = (*layers.shape, layers.p_at, q_at)
            write_project(call, arrays[:5], shapes, layers.low)
            call.renumber((0, 1, 5), 1)
            payload = message.view(np.uint8)
            codec.write_encode(call, FP32, False, (table, payload, found[1], None), layers.exact)

        key = ("subspace_project", layers, q_at.tobytes(), place_of(q), place_of(message))
        self._plans.run(key, write_down, arrays, numbers)
        flags |= found[0] | found[1]

    def subspace_iterate(
        self,
        layers: Any,
        table: SegmentTable,
        outputs: SegmentTable,
        flags: Bytes,
        total: Floats,
        message: Floats,
        own: Floats,
        *,
        divisor: float,
        scale: float,
    ) -> None:
        """See `subspace.iterate`."""
        found = np.zeros(len(table), dtype=np.uint8)
        arrays = (table, total, message, own, outputs, found, flags)
        written = _outputs(outputs)

        def write_down(call: Call) -> None:
            call.renumber((1,), 0)
            write_orthogonalise(call, total, (layers.rows, layers.ranks, layers.p_at))
            call.renumber((4, 1, 5, 5, 6), 0)
            chosen = np.zeros(len(table), dtype=np.bool_)
            chosen[layers.exact] = outputs["output"][layers.exact] != 0
            codec.write_decode(call, FP32, chosen, (outputs, total.view(np.uint8), found, None, flags))
            call.renumber((0, 1, 2, 3), 2)
            shapes = (*layers.shape, layers.p_at, layers.q_at)
            write_back_project(call, arrays[:4], shapes, layers.low)

        key = ("subspace_iterate", layers, written, *map(place_of, arrays[1:4]))
        self._plans.run(key, write_down, arrays, (scale, divisor), (flags, found))

    def subspace_finish(
        self,
        layers: Any,
        table: SegmentTable,
        outputs: SegmentTable,
        flags: Bytes,
        p: Floats,
        own: Floats,
        q: Floats,
        kept: Any,
        *,
        feedback: bool,
        divisor: float,
        scale: float,
    ) -> None:
        """See `subspace.finish`."""
        found = np.zeros(len(table), dtype=np.uint8)
        arrays: tuple[Any, ...] = (table, p, own, q, outputs, found, flags)
        places: tuple[Any, ...] = ()
        if kept is not None:
            arrays = (*arrays, kept.memory)
            places = (kept.before.tobytes(), kept.after.tobytes(), place_of(kept.memory))

        def write_down(call: Call) -> None:
            shapes = (*layers.shape, layers.p_at, layers.q_at)
            if feedback:
                write_subtract(call, arrays[:3], shapes, layers.low)
            call.renumber((4, 1, 3, 5, 6), 0)
            write_expand(call, (outputs, p, q, found, flags), shapes, layers.low)
            if kept is not None:
                call.renumber((3, 7), 2)
                sides = (layers.columns, layers.ranks, layers.q_at, kept.before, kept.after)
                write_keep(call, (q, kept.memory), sides)

        key = ("subspace_finish", layers, feedback, _outputs(outputs), *map(place_of, (p, own, q)), *places)
        self._plans.run(key, write_down, arrays, (divisor, scale), (flags, found))


def _outputs(table: SegmentTable) -> bytes | None:
    """Which rows have an output; None: all."""
    column = table["output"]
    return None if column.all() else (column != 0).tobytes()
