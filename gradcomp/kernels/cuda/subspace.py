"""Subspace iteration on a GPU: each step of :mod:`gradcomp.kernels.subspace` is one prepared call."""

from __future__ import annotations

from typing import Any

import numpy as np

from gradcomp.kernels.cuda.call import Call
from gradcomp.kernels.cuda.codes import write_decode, write_encode
from gradcomp.kernels.cuda.factors import (
    write_back_project,
    write_expand,
    write_keep,
    write_orthogonalise,
    write_project,
    write_subtract,
)
from gradcomp.kernels.cuda.lowrank import check_next_residuals
from gradcomp.kernels.cuda.prepared import Kernels, place_of
from gradcomp.kernels.segments import FP32, Bytes, Factor, Floats, SegmentTable, Sizes


class SubspaceKernels(Kernels):
    """The functions of :mod:`gradcomp.kernels.subspace`, whose `Layers` object is part of their calls' keys."""

    def subspace_project(
        self,
        layers: Any,
        flags: Bytes,
        factors: Floats,
        q: Factor,
        message: Floats,
        *,
        scale: float,
        decay: float,
    ) -> None:
        table = layers.inputs
        check_next_residuals(table)
        found = np.zeros((2, len(table)), dtype=np.uint8)
        arrays = (table, message, q.values, found[0], factors, found[1])
        numbers = (decay, 0, 0, 0, scale, decay, 1.0)

        def write_down(call: Call) -> None:
            write_project(call, arrays[:5], (*layers.shapes, layers.p_at, q.at), layers.low)
            call.part((0, 1, 5), 1)
            payload = message.view(np.uint8)
            write_encode(call, FP32, False, (table, payload, found[1], None), layers.exact)

        def after() -> None:
            np.bitwise_or(flags, found[0], out=flags)
            np.bitwise_or(flags, found[1], out=flags)
            layers.spoil(message[layers.p_size :], flags)

        key = ("subspace_project", layers, q.at.tobytes(), place_of(q.values), place_of(message))
        self._plans.run(key, write_down, arrays, numbers, after=after)

    def subspace_iterate(
        self,
        layers: Any,
        flags: Bytes,
        total: Floats,
        message: Floats,
        own: Floats,
        *,
        divisor: float,
        scale: float,
    ) -> None:
        table, outputs = layers.inputs, layers.outputs
        found = np.zeros(len(table), dtype=np.uint8)
        arrays = (table, total, message, own, outputs, found, flags)
        written = _outputs(outputs)

        def write_down(call: Call) -> None:
            call.part((1,), 0)
            write_orthogonalise(call, total, (layers.rows, layers.ranks, layers.p_at))
            call.part((4, 1, 5, 5, 6), 0)
            chosen = np.zeros(len(table), dtype=np.bool_)
            chosen[layers.exact] = outputs["output"][layers.exact] != 0
            write_decode(call, FP32, chosen, (outputs, total.view(np.uint8), found, None, flags))
            call.part((0, 1, 2, 3), 2)
            write_back_project(call, arrays[:4], _columns(layers), layers.low)

        key = ("subspace_iterate", layers, written, *map(place_of, arrays[1:4]))
        self._plans.run(key, write_down, arrays, (scale, divisor), (flags, found))

    def subspace_finish(
        self,
        layers: Any,
        flags: Bytes,
        p: Floats,
        own: Floats | None,
        q: Floats,
        kept: Any,
        *,
        divisor: float,
        scale: float,
    ) -> None:
        table, outputs = layers.inputs, layers.outputs
        found = np.zeros(len(table), dtype=np.uint8)
        arrays: tuple[Any, ...] = (table, p, own, q, outputs, found, flags)
        places: tuple[Any, ...] = ()
        if kept is not None:
            arrays = (*arrays, kept.memory)
            places = (kept.before.tobytes(), kept.after.tobytes(), place_of(kept.memory))

        def write_down(call: Call) -> None:
            if own is not None:
                write_subtract(call, arrays[:3], _columns(layers), layers.low)
            call.part((4, 1, 3, 5, 6), 0)
            write_expand(call, (outputs, p, q, found, flags), _columns(layers), layers.low)
            if kept is not None:
                call.part((3, 7), 2)
                sides = (layers.columns, layers.ranks, layers.q_at, kept.before, kept.after)
                write_keep(call, (q, kept.memory), sides)

        given = None if own is None else place_of(own)
        key = ("subspace_finish", layers, given, _outputs(outputs), place_of(p), place_of(q), *places)
        self._plans.run(key, write_down, arrays, (divisor, scale), (flags, found))


def _columns(layers: Any) -> tuple[Sizes, ...]:
    return (*layers.shapes, layers.p_at, layers.q_at)


def _outputs(table: SegmentTable) -> bytes | None:
    """Returns the rows that have an output; None if all have one."""
    column = table["output"]
    return None if column.all() else (column != 0).tobytes()
