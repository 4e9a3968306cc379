"""Sums of gradients between two decisions, each layer's held by one rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from gradcomp.core.state import DoubleBuffer
from gradcomp.core.vectors import Floats, Vector, Zeros, host_zeros
from gradcomp.kernels import selection
from gradcomp.kernels.codec import Table


def share_out(sizes: Mapping[int, int], world: int) -> dict[int, int]:
    """Maps each layer to the rank that owns it.

    The largest layer is assigned first; each goes to the rank that has the fewest elements so far.
    """
    loads = [0] * world
    owners: dict[int, int] = {}
    for layer in sorted(sizes, key=lambda layer: (-sizes[layer], layer)):
        rank = loads.index(min(loads))
        owners[layer] = rank
        loads[rank] += max(sizes[layer], 1)
    return owners


class Accumulators:
    """Sums the rank's own gradients in one float32 row per layer that it owns: a_t = a_{t-1} + scale g_t.

    ``sizes`` has the number of elements by layer number, 0 for a layer that another rank owns. ``zeros`` allocates the
    rows. They take 8 bytes per element, since a step that is not accepted must not count.
    """

    def __init__(self, sizes: Sequence[int], zeros: Zeros = host_zeros) -> None:
        self._zeros = zeros
        self._sizes = list(sizes)
        self._own = np.array([size > 0 for size in sizes], dtype=np.bool_)
        self._rows = DoubleBuffer(self._sizes, zeros)

    @property
    def nbytes(self) -> int:
        return self._rows.nbytes

    def add(self, table: Table, layers: npt.NDArray[np.int64], scale: float) -> None:
        """Adds the gradients at the addresses in the table to the rows that this rank owns."""
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
        """Makes the sums of the last step final, for the layers that some rank had."""
        self._rows.commit(present & self._own)

    def take(self) -> dict[int, Vector]:
        """Returns the sums by layer, which then belong to the caller; new sums begin at zero."""
        rows, self._rows = self._rows, DoubleBuffer(self._sizes, self._zeros)
        return {layer: rows.vector(layer) for layer in np.flatnonzero(self._own).tolist()}

    def value(self, layer: int) -> Floats:
        """Returns a read-only view of a layer's sum."""
        return self._rows.value(layer)

    def set(self, layer: int, values: Floats) -> None:
        self._rows.set(layer, values)
