"""The common part of low-rank compressors: layers as matrices, factors in flat arrays, other layers sent exactly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from gradcomp.compress.base import Compressor
from gradcomp.compress.checks import check_whole
from gradcomp.compress.messages import Bytes, Floats
from gradcomp.core.layers import LayerSpec
from gradcomp.core.plan import Level
from gradcomp.kernels.codec import Codec, Group, Sizes, Table
from gradcomp.kernels.devices import Device
from gradcomp.kernels.segments import FP32, Factor
from gradcomp.kernels.step import StepContext
from gradcomp.kernels.subspace import Layers

EXACT = Codec(FP32)
"""The codec of layers that are not approximated."""


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return (n, m): the first dimension and the product of the others (Vogels et al. 2019); (size, 1) for a vector."""
    if len(shape) < 2:
        return int(np.prod(shape)), 1
    return shape[0], int(np.prod(shape[1:]))


def clamped_rank(shape: tuple[int, ...], rank: int) -> int:
    """Return the rank at which a layer of this shape is approximated: at most min(n, m), or 0 if it is sent exactly.

    A layer is sent exactly where the factors would take r (n + m) >= n m elements: vectors, and small or narrow
    matrices.
    """
    n, m = matrix_shape(shape)
    rank = min(rank, n, m)
    return rank if rank * (n + m) < n * m else 0


@dataclass(frozen=True)
class LowRank(Compressor):
    """The base class of compressors that treat layers as matrices; their level is the rank."""

    level_field: ClassVar[str | None] = "rank"

    rank: int = 4

    def __post_init__(self) -> None:
        check_whole("rank", self.rank, 1, 2**15 - 1)

    def fill(self, table: Table, level: Level) -> None:
        """Write the configured rank to the table; :class:`Matrices` clamps it."""
        check_whole("rank", level, 1, 2**15 - 1)
        table["level"] = level
        table["bucket_size"] = 1

    def remark(self, layer: LayerSpec) -> str | None:
        """Return a warning if the rank exceeds the smaller dimension of the matrix."""
        n, m = matrix_shape(layer.shape)
        clamped = len(layer.shape) > 1 and self.rank > min(n, m)
        return f"rank {self.rank} is more than a matrix of {n} x {m} has" if clamped else None


@dataclass(frozen=True, eq=False)
class Matrices(Layers):
    """Divide a group's layers into those that are approximated and those that are sent exactly."""

    @staticmethod
    def of(group: Group) -> Matrices:
        """Return the matrices of a group, at the ranks in its table."""
        shapes = np.array([matrix_shape(shape) for shape in group.shapes], dtype=np.int64).reshape(-1, 2)
        wanted = group.table["level"].tolist()
        ranks = np.array(list(map(clamped_rank, group.shapes, wanted)), dtype=np.int64)
        low, exact = np.flatnonzero(ranks), np.flatnonzero(ranks == 0)
        rows, columns = np.ascontiguousarray(shapes[low].T)
        ranks = ranks[low]
        p_sizes, q_sizes = ranks * rows, ranks * columns
        exact_lengths = group.table["length"][exact].astype(np.int64)
        return Matrices(
            group.inputs,
            group.table,
            low,
            exact,
            rows,
            columns,
            ranks,
            np.cumsum(p_sizes) - p_sizes,
            np.cumsum(q_sizes) - q_sizes,
            int(p_sizes.sum()),
            int(q_sizes.sum()),
            int(exact_lengths.sum()),
            4 * (int(p_sizes.sum()) + np.cumsum(exact_lengths) - exact_lengths),
            exact_lengths,
        )

    def split(self, flags: Bytes) -> tuple[Bytes, Bytes]:
        """Return the flags of the approximated layers, and of the others."""
        return flags[self.low], flags[self.exact]

    def join(self, low: Bytes, exact: Bytes) -> Bytes:
        """Return the flags of all layers, from those of :meth:`split`."""
        flags = np.empty(len(self.low) + len(self.exact), dtype=np.uint8)
        flags[self.low], flags[self.exact] = low, exact
        return flags

    def project(
        self, device: Device, table: Table, context: StepContext, q: Factor, p: Floats, flags: Bytes
    ) -> None:
        """Write M to the next residuals and M Q to ``p``; M Q is NaN for a layer that is not finite, and so is the sum.

        ``table`` and ``flags`` are those of the approximated layers.
        """
        factors = context.factors(len(self.low))
        device.kernels.project(table, flags, factors, self.shapes, q, self.p(p), decay=context.decay)

    def expand(self, group: Group, context: StepContext, p: Floats, q: Floats, flags: Bytes) -> None:
        """Write means to the outputs, from factors of which one is a sum over ranks.

        ``flags`` are those of the approximated layers.
        """
        factors = self.p(p), self.q(q)
        table, divisor, scale = group.table[self.low], context.divisor, context.unscale
        group.device.kernels.expand(table, flags, self.shapes, *factors, divisor=divisor, scale=scale)

    def write_exact(self, group: Group, context: StepContext, view: Floats, flags: Bytes) -> None:
        """Fill ``view`` with the layers that are sent exactly, and with zeros for layers that are not finite.

        :meth:`spoil` later overwrites these zeros with NaN. ``flags`` are those of the layers that are sent exactly.
        """
        if len(self.exact):
            table = self._exact_rows(group.inputs)
            EXACT.encode(
                group.device, table, view.view(np.uint8), flags, context.draw, context.scale, context.decay
            )

    def read_exact(self, group: Group, context: StepContext, total: Floats, flags: Bytes) -> None:
        """Write the means of the layers that are sent exactly, from their sum; NaN for flagged layers."""
        if len(self.exact):
            table = self._exact_rows(group.table)
            EXACT.decode(group.device, table, total.view(np.uint8), flags, context.divisor, context.unscale)

    def _exact_rows(self, table: Table) -> Table:
        rows = table[self.exact]
        rows["payload"] = self.exact_at - 4 * self.p_size
        rows["bucket_size"] = 1
        return rows


def elements(group: Group, sent: Callable[[int, int, int], int]) -> Sizes:
    """Return ``sent(n, m, r)`` for every row that is approximated, and the length of every row that is sent exactly."""

    def of(shape: tuple[int, ...], rank: int, length: int) -> int:
        low = clamped_rank(shape, rank)
        return sent(*matrix_shape(shape), low) if low else length

    levels, lengths = group.table["level"].tolist(), group.table["length"].tolist()
    return np.array(list(map(of, group.shapes, levels, lengths)), dtype=np.int64)
