"""Sums of gradients between two decisions, each layer's on one rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from gradcomp.core.state import DoubleBuffer
from gradcomp.core.vectors import Floats, Vector, Zeros, host_zeros
from gradcomp.kernels import selection
from gradcomp.kernels.codec import Table


def share_out(sizes: Mapping[int, int], world: int) -> dict[int, int]:
    """Layer -> the rank that looks after it: the largest first, each to the rank with the fewest elements so far."""
    loads = [0] * world
    owners: dict[int, int] = {}
    for layer in sorted(sizes, key=lambda layer: (-sizes[layer], layer)):
        rank = loads.index(min(loads))
        owners[layer] = rank
        loads[rank] += max(sizes[layer], 1)
    return owners


class Accumulators:
    """One float32 row per layer that this rank looks after: a_t = a_{t-1} + scale g_t of the rank's own gradients.

    ``sizes``: elements by layer number, 0 for a layer that is another rank's. Memory: 8 bytes per element, since a
    step that is not accepted must not count. ``zeros``: where the rows lie.
    """

    def __init__(self, sizes: Sequence[int], zeros: Zeros = host_zeros) -> None:
        self._zeros = zeros
        self._sizes = list(sizes)
        self._own = np.array([size > 0 for size in sizes], dtype=np.bool_)
        self._rows = DoubleBuffer(self._sizes, zeros)

    @property
    def nbytes(self) -> int:
        """Memory of the rows."""
        return self._rows.nbytes

    def add(self, table: Table, layers: npt.NDArray[np.int64], scale: float) -> None:
        """The gradients at the addresses in the table, for the rows that are this rank's."""
        own = self._own[layers]
        if not own.any():
            return
        table, layers = table[own], layers[own]
        table["residual"] = self._rows.read_addresses(layers, table["start"])
        table["next_residual"] = self._rows.write_addresses(layers, table["start"])
        flags = np.zeros(len(table), dtype=np.uint8)
        factors = np.full(len(table), scale, dtype=np.float32)
        selection.contribute(table, flags, factors, decay=1.0)

    def commit(self, present: npt.NDArray[np.bool_]) -> None:
        """The step was accepted."""
        self._rows.commit(present & self._own)

    def take(self) -> dict[int, Vector]:
        """The sums by layer, which are the caller's from now on; they begin again at zero."""
        rows, self._rows = self._rows, DoubleBuffer(self._sizes, self._zeros)
        return {layer: rows.vector(layer) for layer in np.flatnonzero(self._own).tolist()}

    def value(self, layer: int) -> Floats:
        """A layer's sum, read-only."""
        return self._rows.value(layer)

    def set(self, layer: int, values: Floats) -> None:
        """Replace a layer's sum."""
        self._rows.set(layer, values)
