"""Sent is the vector g of LGC: the values of a group's layers at the selected indices."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gradcomp.compress.messages import Bytes
from gradcomp.compress.sparse.payload import Selection
from gradcomp.compress.sparse.summed import Floats
from gradcomp.kernels import indices, selection
from gradcomp.kernels.codec import Group, Sizes


@dataclass(frozen=True, eq=False)
class Sent:
    """Locate g, the selected values of a group, with layers in the order of the model, whatever order they travel in.

    ``places``: of each value in the arrays of ``chosen``. ``rows``: the row that each belongs to.
    """

    chosen: Selection
    places: Sizes
    rows: Sizes

    @staticmethod
    def of(group: Group, chosen: Selection) -> Sent:
        """Return the places for the selection of a group."""
        order = np.argsort(group.layers, kind="stable")
        places = [np.arange(n) + begin for begin, n in zip(chosen.offsets, chosen.counts, strict=True)]
        ordered = [places[row] for row in order.tolist()]
        return Sent(
            chosen,
            np.concatenate([np.zeros(0, np.int64), *ordered]),
            np.repeat(order, chosen.counts[order]),
        )

    @property
    def count(self) -> int:
        """Return the number of values."""
        return len(self.places)

    def values(self, group: Group, flags: Bytes) -> Floats:
        """Return this rank's values; zeros for rows that are flagged, because a code mixes rows."""
        chosen = self.chosen
        selection.take(group.inputs, chosen.offsets, chosen.counts, chosen.indices, chosen.values)
        found: Floats = chosen.values[self.places]
        found[flags[self.rows] != 0] = 0
        return found

    def in_rows(self, values: Floats) -> Floats:
        """Return values of g in the order of the selection."""
        found: npt.NDArray[np.float32] = np.zeros_like(self.chosen.values)
        found[self.places] = values
        return found

    def scatter(self, group: Group, flags: Bytes, values: Floats, divisor: float, scale: float) -> None:
        """Write ``values`` / divisor * scale to the outputs at the selected indices, 0 elsewhere."""
        chosen = self.chosen
        indices.scatter_values(
            group.table,
            flags,
            chosen.offsets,
            chosen.counts,
            chosen.indices,
            self.in_rows(values),
            divisor=divisor,
            scale=scale,
        )


def shares(nbytes: int, counts: Sizes) -> Sizes:
    """Divide ``nbytes`` among rows in proportion to their ``counts``."""
    ends = np.cumsum(counts) * nbytes // max(int(counts.sum()), 1)
    found: Sizes = np.diff(ends, prepend=0)
    return found
