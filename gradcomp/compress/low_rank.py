"""What low-rank compressors share: layers as matrices, factors in flat arrays, vectors sent as they are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gradcomp.compress.messages import Bytes, Context, Floats
from gradcomp.core.errors import ConfigError
from gradcomp.core.layers import LayerSpec
from gradcomp.core.plan import Level
from gradcomp.kernels.codec import Codec, Group, Sizes, Table
from gradcomp.kernels.segments import FP32

_EXACT = Codec(FP32)


def check_rank(rank: Level) -> None:
    """ConfigError unless it is a whole number from 1 on."""
    if isinstance(rank, bool) or not isinstance(rank, int) or not 1 <= rank < 2**15:
        raise ConfigError(f"rank must be a whole number of at least 1, got {rank!r}")


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """n x m: the first dimension against all others, as 004 reshapes convolutions; (size, 1) for a vector."""
    if len(shape) < 2:
        return int(np.prod(shape)), 1
    return shape[0], int(np.prod(shape[1:]))


def clamped_rank(shape: tuple[int, ...], rank: int) -> int:
    """The rank at which a layer of this shape is approximated: at most min(n, m); 0 where it is sent as it is.

    That is where the factors would take r (n + m) >= n m elements: vectors, and matrices that are small or narrow.
    """
    n, m = matrix_shape(shape)
    rank = min(rank, n, m)
    return rank if rank * (n + m) < n * m else 0


@dataclass(frozen=True, eq=False)
class Matrices:
    """The group's layers that are approximated, and those that travel exactly beside them.

    ``low``, ``exact``: rows of the group's table. ``rows``, ``columns``, ``ranks``: n, m and r of the ``low`` ones;
    their factors P (r x n) and Q (r x m) begin at ``p_at`` and ``q_at`` of flat arrays of ``p_size`` and ``q_size``.
    """

    low: Sizes
    exact: Sizes
    rows: Sizes
    columns: Sizes
    ranks: Sizes
    p_at: Sizes
    q_at: Sizes
    p_size: int
    q_size: int
    exact_size: int

    @staticmethod
    def of(group: Group) -> Matrices:
        """For the ranks in ``bits``."""
        shapes = [matrix_shape(shape) for shape in group.shapes]
        wanted = group.table["bits"].tolist()
        ranks = np.array(
            [clamped_rank(s, r) for s, r in zip(group.shapes, wanted, strict=True)], dtype=np.int64
        ).reshape(len(shapes))
        low, exact = np.flatnonzero(ranks), np.flatnonzero(ranks == 0)
        rows = np.array([n for n, _ in shapes], dtype=np.int64)[low]
        columns = np.array([m for _, m in shapes], dtype=np.int64)[low]
        ranks = ranks[low]
        p_sizes, q_sizes = ranks * rows, ranks * columns
        return Matrices(
            low,
            exact,
            rows,
            columns,
            ranks,
            np.cumsum(p_sizes) - p_sizes,
            np.cumsum(q_sizes) - q_sizes,
            int(p_sizes.sum()),
            int(q_sizes.sum()),
            int(group.table["length"][exact].sum()),
        )

    @property
    def shape(self) -> tuple[Sizes, Sizes, Sizes]:
        """n, m, r: what every kernel asks for."""
        return self.rows, self.columns, self.ranks

    def write_exact(self, group: Group, context: Context, view: Floats, flags: Bytes) -> None:
        """Fill ``view`` with the layers that travel exactly; NaN for one that is not finite."""
        table = self._exact_rows(group.inputs)
        found = np.zeros(len(table), dtype=np.uint8)
        _EXACT.encode(table, view.view(np.uint8), found, context.draw, context.scale, context.decay)
        for row in np.flatnonzero(found):
            start = int(table["payload"][row]) // 4
            view[start : start + int(table["length"][row])] = np.nan
        flags[self.exact] |= found

    def read_exact(self, group: Group, context: Context, total: Floats, flags: Bytes) -> None:
        """Write the means of the layers that travel exactly, from their sum."""
        table = self._exact_rows(group.table)
        found = np.zeros(len(table), dtype=np.uint8)
        _EXACT.decode(table, total.view(np.uint8), found, context.divisor, context.unscale)
        flags[self.exact] |= found

    def _exact_rows(self, table: Table) -> Table:
        rows = table[self.exact]
        sizes = 4 * rows["length"]
        rows["payload"] = np.cumsum(sizes) - sizes
        rows["bucket_size"] = 1
        return rows


def factor_elements(table: Table, shapes: tuple[tuple[int, ...], ...]) -> npt.NDArray[np.int64]:
    """r (n + m) of every row, or its length where it travels exactly."""
    sizes = []
    for shape, rank, length in zip(shapes, table["bits"].tolist(), table["length"].tolist(), strict=True):
        low = clamped_rank(shape, rank)
        sizes.append(low * sum(matrix_shape(shape)) if low else length)
    return np.array(sizes, dtype=np.int64)


def whole_layer(layer: LayerSpec) -> int:
    """Where a matrix may be cut into slices: nowhere."""
    return max(layer.size, 1)
