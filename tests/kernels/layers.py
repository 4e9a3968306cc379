"""Whole layers with their memory, and what a backend of the kernels selects from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from kernels.groups import GuardedArray

from gradcomp.kernels import segments

GUARD = 0xA5A5A5A5
GAP = 3  # guard items around every row's selection


@dataclass
class Layer:
    """One row of a table, by value."""

    gradient: Any  # array in the layer's dtype, or None with `length` given
    residual: Any = None
    dtype: int = segments.FLOAT32
    factor: float = 1.0
    length: int = -1

    def __post_init__(self) -> None:
        if self.gradient is not None:
            self.length = len(self.gradient)

    def contribution(self, decay: float = 1.0) -> Any:
        """c, in float32."""
        gradient = np.zeros(self.length) if self.gradient is None else self.gradient
        c = np.float32(self.factor) * gradient.astype(np.float32)
        return c if self.residual is None else c + np.float32(decay) * self.residual


class Layers:
    """Layers with their next residuals, and room for their selections in flat arrays between guards."""

    def __init__(
        self, layers: Sequence[Layer], contributions: Sequence[Any] | None = None, memory: Any = GuardedArray
    ) -> None:
        self.layers = layers
        self.table = np.zeros(len(layers), segments.SEGMENT)
        self.next_residuals = [memory(layer.length, np.float32) for layer in layers]
        for row, layer, next_residual in zip(self.table, layers, self.next_residuals, strict=True):
            row["length"], row["dtype"] = layer.length, layer.dtype
            if layer.length:
                row["next_residual"] = next_residual.array.ctypes.data
                row["gradient"] = 0 if layer.gradient is None else layer.gradient.ctypes.data
                row["residual"] = 0 if layer.residual is None else layer.residual.ctypes.data
        self.factors = np.array([layer.factor for layer in layers], np.float32)
        self.flags = np.full(len(layers), 2, np.uint8)  # only ORed into
        for next_residual, c in zip(self.next_residuals, contributions or [], strict=False):
            next_residual.array[:] = c

    def space(self, counts: Sequence[int]) -> tuple[Any, Any, Any, Any]:
        """Counts, offsets, indices and values for selections of that size."""
        ends = np.cumsum(np.array(counts, np.int64) + GAP)
        offsets = np.concatenate(([0], ends[:-1])).astype(np.int64) + GAP
        size = int(ends[-1]) + 2 * GAP
        return (
            np.array(counts, np.int64),
            offsets,
            np.full(size, GUARD, np.uint32),
            np.full(size, GUARD, np.uint32).view(np.float32),
        )

    def contribute(self, backend: Any, decay: float = 1.0) -> Any:
        backend.contribute(self.table, self.flags, self.factors, decay=decay)
        return self.flags.tolist(), self.next_residual_bytes()

    def select_top(
        self, backend: Any, counts: Sequence[int], decay: float = 1.0, *, zeros: bool = True
    ) -> Any:
        numbers, offsets, indices, values = self.space(counts)
        found = np.full(len(self.layers), -1, np.int64)
        lists = numbers, offsets, indices, values, found
        backend.select_top(self.table, self.flags, self.factors, *lists, decay=decay, zeros=zeros)
        assert not zeros or found.tolist() == list(counts)
        return (
            self.flags.tolist(),
            self.selections(offsets, found, indices, values),
            values.tobytes(),
            self.next_residual_bytes(),
        )

    def select_above(self, backend: Any, thresholds: Sequence[float], limits: Sequence[int]) -> Any:
        numbers, offsets, indices, values = self.space(limits)
        found = np.full(len(self.layers), -1, np.int64)
        backend.select_above(
            self.table, np.array(thresholds, np.float32), numbers, offsets, indices, values, found
        )
        return found.tolist(), self.selections(offsets, found, indices, values), values.tobytes()

    def sample_thresholds(self, backend: Any, counts: Sequence[int], stride: int, phase: int) -> list[float]:
        thresholds = np.full(len(self.layers), np.nan, np.float32)
        backend.sample_thresholds(
            self.table, np.array(counts, np.int64), thresholds, stride=stride, phase=phase
        )
        return thresholds.tolist()

    def tail(self, backend: Any, thresholds: Sequence[float]) -> Any:
        counts = np.full(len(self.layers), -1, np.int64)
        sums, squares = np.full((2, len(self.layers)), np.nan)
        maxima = np.full(len(self.layers), np.nan, np.float32)
        backend.tail(self.table, np.array(thresholds, np.float32), counts, sums, squares, maxima)
        return counts.tolist(), sums.tolist(), squares.tolist(), maxima.tolist()

    def squares(self, backend: Any) -> bytes:
        out = np.full(len(self.layers), -1.0)
        backend.squares(self.table, out)
        out[np.isnan(out)] = np.nan
        return out.tobytes()

    def selections(self, offsets: Any, counts: Any, indices: Any, values: Any) -> list[list[int]]:
        """The indices of each row; everything between the selections must be untouched."""
        untouched = np.ones(len(indices), bool)
        rows = [slice(o, o + n) for o, n in zip(offsets, counts, strict=True)]
        for row in rows:
            untouched[row] = False
        assert (indices[untouched] == GUARD).all(), "written beyond the indices"
        assert (values.view(np.uint32)[untouched] == GUARD).all(), "written beyond the values"
        return [indices[row].tolist() for row in rows]

    def next_residual_bytes(self) -> list[bytes]:
        """The bytes of the next residuals; one NaN is as good as another."""
        for next_residual in self.next_residuals:
            assert np.isnan(next_residual.memory[[0, -1]]).all(), "written beyond the next residual"
        return [
            np.where(np.isnan(s.array), np.float32(np.nan), s.array).tobytes() for s in self.next_residuals
        ]
