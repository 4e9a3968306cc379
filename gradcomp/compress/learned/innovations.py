"""Innovations, in LGC's parameter-server form, are the largest values of each rank, which it sends itself."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gradcomp.compress.learned.form import Marking
from gradcomp.compress.learned.sent import Sent
from gradcomp.compress.messages import Bytes
from gradcomp.compress.sparse.payload import Selection
from gradcomp.compress.sparse.summed import Floats
from gradcomp.kernels import selection
from gradcomp.kernels.codec import Group, Sizes
from gradcomp.kernels.step import StepContext

_WIDTH = 32  # An index has so many bits.


class Selecting(Marking):
    """Select this rank's innovations, into ``own``, while the leader's indices are shared.

    Each rank takes the largest |p| of its own layers. On the leader they are among what it has selected.
    """

    def __init__(self, sent: Sent, own: Selection) -> None:
        self._sent = sent
        self.own = own

    def lead(self, group: Group, chosen: Selection, flags: Bytes, view: Bytes) -> None:
        """Take the largest elements of the selection, ties by lower index."""
        own, rows = self.own, row_of(chosen.counts)
        order = np.lexsort((chosen.indices, -np.abs(chosen.values), rows))
        rank = np.arange(len(rows)) - np.repeat(np.cumsum(chosen.counts) - chosen.counts, chosen.counts)
        places = np.sort(order[rank < own.counts[rows]])
        own.indices[:], own.values[:] = chosen.indices[places], chosen.values[places]

    def follow(self, group: Group, context: StepContext, flags: Bytes) -> None:
        """Take the largest elements of p, which is written to the next residuals."""
        own, factors = self.own, context.factors(len(group.table))
        selection.select_top(
            group.inputs,
            flags,
            factors,
            own.counts,
            own.offsets,
            own.indices,
            own.values,
            own.counts,
            decay=context.decay,
            zeros=True,  # their number must not depend on the values
        )

    def marks(self) -> npt.NDArray[np.bool_]:
        """Mark the innovations among the leader's indices."""
        sent, own = self._sent, self.own
        at, inside = find(sent.chosen, row_of(own.counts), own.indices)
        marks = np.zeros(len(sent.chosen.indices), np.bool_)
        marks[at[inside]] = True
        return marks[sent.places]


@dataclass(frozen=True, eq=False)
class Arrived:
    """Hold the innovations of all ranks, in relation to a selection S.

    ``inside``: those in S, (ranks, values of S), in the order of :class:`Sent`, zeros elsewhere. ``outside``: by rank,
    those elsewhere.
    """

    inside: Floats
    outside: list[Selection]

    @staticmethod
    def of(sent: Sent, ranks: list[Selection]) -> Arrived:
        """Divide each rank's innovations into those inside and outside of S."""
        inside = np.zeros((len(ranks), sent.count), np.float32)
        outside = []
        for row, one in zip(inside, ranks, strict=True):
            rows = row_of(one.counts)
            at, found = find(sent.chosen, rows, one.indices)
            flat = np.zeros(len(sent.chosen.indices), np.float32)
            flat[at[found]] = one.values[found]
            row[:] = flat[sent.places]
            counts = np.bincount(rows[~found], minlength=len(one.counts))
            left = one.indices[~found], one.values[~found]
            outside.append(Selection(np.cumsum(counts) - counts, counts, *left))
        return Arrived(inside, outside)


def row_of(counts: Sizes) -> Sizes:
    """Return the row of each element, for ``counts`` elements per row."""
    return np.repeat(np.arange(len(counts)), counts)


def find(
    chosen: Selection, rows: Sizes, wanted: npt.NDArray[np.uint32]
) -> tuple[Sizes, npt.NDArray[np.bool_]]:
    """Return the place of each element in a selection of fixed counts, and whether it is there at all."""
    keys = (row_of(chosen.counts) << _WIDTH) + chosen.indices
    own = (rows << _WIDTH) + wanted
    at = np.minimum(np.searchsorted(keys, own), len(keys) - 1)
    return at, keys[at] == own
