"""Measures the gradients that a rank has gathered: one row of numbers per layer, or per block of its rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from gradcomp.control.base import Doubles
from gradcomp.control.candidates import CandidateLevels
from gradcomp.control.distortion.block_errors import block_errors
from gradcomp.control.distortion.errors import errors
from gradcomp.control.observations import Numbers
from gradcomp.core.vectors import Floats, Vector
from gradcomp.kernels import bodies, selection
from gradcomp.kernels.segments import SEGMENT

#: Columns before those of the errors: norm, mean, standard deviation.
COLUMNS = 3


def measure(
    candidates: CandidateLevels, sums: Mapping[int, Vector], width: int, seed: int, memory_bytes: int | None
) -> Doubles:
    """Returns the rows of the layers whose ``sums`` are given, by layer number; zeros for all others.

    Of the ``width`` columns those after :data:`COLUMNS` have the L2 norm of each candidate's error. One more has the
    root of the number of nonzero elements, for rows with choices that leave zeros out: it is the norm of ones in their
    places, since every column but the mean is a norm.
    """
    table = np.zeros((len(candidates.layers), width))
    layers = {layer: rows for layer, rows in candidates.items.items() if layer in sums}
    begins = [candidates.starts[rows] for rows in layers.values()]
    moments = _moments([sums[layer] for layer in layers], begins)
    for (layer, rows), starts, (mean, square) in zip(layers.items(), begins, moments, strict=True):
        values, choices, spec = sums[layer], candidates.choices[rows.start], candidates.specs[rows.start]
        sizes = np.diff(starts, append=values.size)
        with np.errstate(all="ignore"):  # values that are not finite are checked once rows are shared
            deviation = np.sqrt(np.maximum(square / sizes - mean * mean, 0.0))
        table[rows, :COLUMNS] = np.stack([np.sqrt(square), mean, deviation], axis=1)
        if width > COLUMNS:
            table[rows, COLUMNS : COLUMNS + len(choices)] = (
                errors(choices, spec, values, seed, memory_bytes=memory_bytes)
                if len(rows) == 1
                else block_errors(
                    choices, replace(spec, shape=(values.size,)), values, starts, seed, memory_bytes
                )
            )
        if width > COLUMNS + candidates.width and candidates.leaves_zeros[rows.start]:
            table[rows, -1] = np.sqrt(np.count_nonzero(values.read()))
    return table


def _moments(vectors: Sequence[Vector], begins: Sequence[Numbers]) -> list[tuple[Doubles, Doubles]]:
    """Returns, by vector, means and sums of squares of its parts, which begin at ``begins``; computed on its device."""
    lengths = [np.diff(starts, append=v.size) for v, starts in zip(vectors, begins, strict=True)]
    table = np.zeros(sum(map(len, begins)), dtype=SEGMENT)
    if not len(table):
        return []
    table["gradient"] = np.concatenate([v.address + 4 * at for v, at in zip(vectors, begins, strict=True)])
    table["length"] = np.concatenate(lengths)
    ends = np.cumsum([len(starts) for starts in begins])[:-1]
    device = bodies.on_device(vectors[0].address)
    if device is not None:
        found: Doubles = device.moments(table)
        means, squares = found[:, 0] / table["length"], found[:, 1].copy()
    else:
        squares = np.zeros(len(table))
        selection.squares(table, squares)
        means = np.concatenate(
            [_means(v.read(), at, sizes) for v, at, sizes in zip(vectors, begins, lengths, strict=True)]
        )
    return list(zip(np.split(means, ends), np.split(squares, ends), strict=True))


def _means(values: Floats, begins: Numbers, lengths: Numbers) -> Doubles:
    if len(begins) == 1:
        return np.array([values.mean(dtype=np.float64)])
    found: Doubles = np.add.reduceat(values, begins, dtype=np.float64) / lengths
    return found
