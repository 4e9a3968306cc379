"""Runs the selection of a sparse compressor without a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gradcomp import Compressor
from gradcomp.compress.sparse.payload import Selection
from gradcomp.kernels.codec import Draw, Group
from gradcomp.kernels.segments import SEGMENT
from gradcomp.kernels.step import StepContext


@dataclass
class Selected:
    """Holds the selected indices and values, p and the flag of every layer, and the flat arrays of the selection."""

    indices: list[list[int]]
    values: list[list[float]]
    p: list[np.ndarray]
    flags: list[int]
    selection: Selection
    limits: list[int]


def select(
    compressor: Compressor,
    *gradients: np.ndarray,
    residuals: Sequence[np.ndarray] | None = None,
    step: int = 0,
) -> Selected:
    """Selects from one group of float32 layers."""
    table = np.zeros(len(gradients), SEGMENT)
    p = [np.full(len(g), 777, np.float32) for g in gradients]
    table["length"] = [len(g) for g in gradients]
    table["gradient"] = [g.ctypes.data for g in gradients]
    table["next_residual"] = [c.ctypes.data for c in p]
    if residuals is not None:
        table["residual"] = [e.ctypes.data for e in residuals]
    compressor.fill(table, compressor.level)
    group = Group(compressor, table, np.arange(len(table)), compressor.traits.keeps_residual)
    limits = compressor.limits(table)
    chosen = Selection.allocate(limits)
    flags = np.zeros(len(table), np.uint8)
    compressor.select(group, StepContext(Draw(0, step, 0), 1), chosen, flags)
    rows = [slice(o, o + n) for o, n in zip(chosen.offsets, chosen.counts, strict=True)]
    return Selected(
        [chosen.indices[row].tolist() for row in rows],
        [chosen.values[row].tolist() for row in rows],
        p,
        flags.tolist(),
        chosen,
        limits.tolist(),
    )


def largest(p: np.ndarray, count: int) -> np.ndarray:
    """Returns the indices of the largest magnitudes, ascending; of equal ones the first are taken."""
    return np.sort(np.argsort(-np.abs(p), kind="stable")[:count])


def only_largest(p: np.ndarray, count: int) -> np.ndarray:
    """Returns p with zeros in place of all but the largest magnitudes."""
    kept, at = np.zeros_like(p), largest(p, count)
    kept[at] = p[at]
    return kept


def samples(size: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Returns layers of very different distributions."""
    rng = np.random.default_rng(seed)
    normal = rng.standard_normal(size)
    drawn = {
        "normal": normal,
        "laplace": rng.laplace(size=size),
        "heavy": rng.standard_t(3, size),
        "uniform": rng.uniform(-1, 1, size),
        "lognormal": np.exp(2 * normal),
        "mostly zero": np.where(rng.random(size) < 0.1, normal, 0),
        "few values": np.round(normal),
        "two scales": np.where(rng.random(size) < 0.02, 30, 1) * normal,
        "subnormal": normal * 1e-42,
        "huge": normal * 5e37,
        "equal": np.full(size, -0.3),
        "zero": np.zeros(size),
    }
    return {name: values.astype(np.float32) for name, values in drawn.items()}
