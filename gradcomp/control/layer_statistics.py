"""What a rank measures of the gradients that it added up: one row of numbers per layer, or per block of its rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from gradcomp.control.base import Doubles
from gradcomp.control.candidates import CandidateLevels
from gradcomp.control.distortion.errors import errors
from gradcomp.core.vectors import Vector
from gradcomp.kernels import bodies, selection
from gradcomp.kernels.segments import SEGMENT

#: Columns before those of the errors: norm, mean, deviation.
COLUMNS = 3


def measure(
    candidates: CandidateLevels, sums: Mapping[int, Vector], width: int, seed: int, memory_bytes: int | None
) -> Doubles:
    """The rows of the layers whose ``sums`` are given, by layer number; zeros for all others.

    ``width``: columns; beyond :data:`COLUMNS` they are for the L2 norm of what each candidate loses. One more is for
    the root of the number of elements that are not 0, of rows with choices that leave zeros out: the norm of ones in
    their places, since every column but the mean is a norm.
    """
    table = np.zeros((len(candidates.layers), width))
    rows = [row for row, number in enumerate(candidates.layers.tolist()) if number in sums]
    measured = [_of_row(candidates, row, sums) for row in rows]
    for row, values, (mean, square) in zip(rows, measured, _moments(measured).tolist(), strict=True):
        deviation = np.sqrt(max(square / values.size - mean * mean, 0.0))
        table[row, :COLUMNS] = np.sqrt(square), mean, deviation
        if width > COLUMNS:
            choices, spec = candidates.choices[row], candidates.specs[row]
            table[row, COLUMNS : COLUMNS + len(choices)] = errors(
                choices, spec, values, seed, memory_bytes=memory_bytes, start=int(candidates.starts[row])
            )
        if width > COLUMNS + candidates.width and candidates.leaves_zeros[row]:
            table[row, -1] = np.sqrt(np.count_nonzero(values.read()))
    return table


def _of_row(candidates: CandidateLevels, row: int, sums: Mapping[int, Vector]) -> Vector:
    values, size = sums[int(candidates.layers[row])], candidates.specs[row].size
    start = int(candidates.starts[row])
    return values if size == values.size else values.part(start, start + size)


def _moments(vectors: Sequence[Vector]) -> Doubles:
    """Mean and sum of squares of each, where they lie."""
    table = np.zeros(len(vectors), dtype=SEGMENT)
    table["gradient"] = [vector.address for vector in vectors]
    table["length"] = [vector.size for vector in vectors]
    device = bodies.on_device(vectors[0].address) if vectors else None
    if device is not None:
        found: Doubles = device.moments(table) / np.stack([table["length"], np.ones(len(table))], axis=1)
        return found
    squares = np.zeros(len(vectors))
    selection.squares(table, squares)
    means = np.array([vector.read().mean(dtype=np.float64) for vector in vectors])
    return np.stack([means, squares], axis=1)
