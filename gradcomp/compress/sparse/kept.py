"""KeptIndices stores indices for several steps, as state: a field of each layer, equal on all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from gradcomp.compress.base import SHARED
from gradcomp.compress.sparse.payload import Selection
from gradcomp.core.errors import StateError
from gradcomp.kernels.codec import Group, Sizes
from gradcomp.kernels.step import StepContext

Floats = npt.NDArray[np.float32]

#: The name of the field.
KEPT: Final = f"{SHARED}kept_indices"
# The field is float32, in which marks up to this number and halves of an index, below 2**16, are exact.
_PERIODS = 1 << 23
_HALF = 1 << 16


def elements_for(count: int) -> int:
    """Return the elements of the field of a layer with ``count`` indices."""
    return 2 * count + 1 if count else 0


def mark_of(period: int) -> int:
    """Return the number that marks a period in the field: never 0, with which a field begins."""
    return period % _PERIODS + 1


@dataclass(frozen=True, eq=False)
class KeptIndices:
    """Locate each layer's mark, upper halves of indices, and lower halves, in the fields of a group.

    For every index, ``starts`` tells if it is the first of its layer, and ``lengths`` is the length of that layer.
    """

    marks: Sizes
    upper: Sizes
    lower: Sizes
    starts: npt.NDArray[np.bool_]
    lengths: Sizes

    @staticmethod
    def of(group: Group, chosen: Selection) -> KeptIndices:
        """Return the places for the selection of a group."""
        counts = chosen.counts
        sizes = np.where(counts > 0, 2 * counts + 1, 0)
        begins = np.cumsum(sizes) - sizes
        upper = np.arange(counts.sum()) + np.repeat(begins + 1 - chosen.offsets, counts)
        starts = np.zeros(counts.sum(), np.bool_)
        starts[chosen.offsets[counts > 0]] = True
        lengths = np.repeat(group.table["length"].astype(np.int64), counts)
        return KeptIndices(begins[counts > 0], upper, upper + np.repeat(counts, counts), starts, lengths)

    def load(self, group: Group, context: StepContext, mark: int, into: Selection) -> bool:
        """Read the indices; return False unless all layers have this mark. StateError for impossible indices."""
        values = context.load(KEPT, group.layers)
        if not (values[self.marks] == mark).all():
            return False
        found = values[self.upper].astype(np.int64) * _HALF + values[self.lower].astype(np.int64)
        ascends = self.starts[1:] | (np.diff(found) > 0)
        if not ascends.all() or (found < 0).any() or (found >= self.lengths).any():
            raise StateError("the kept indices in the state are out of range or do not ascend")
        into.indices[:] = found
        return True

    def store(self, group: Group, context: StepContext, mark: int, chosen: Selection) -> None:
        """Store the indices, which takes effect once the step is accepted."""
        values = np.zeros(len(self.marks) + 2 * len(self.upper), np.float32)
        values[self.marks] = mark
        values[self.upper] = chosen.indices // _HALF
        values[self.lower] = chosen.indices % _HALF
        context.store(KEPT, group.layers, values)
