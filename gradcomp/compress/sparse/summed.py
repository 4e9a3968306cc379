"""Summed is the base of the compressors that send the same elements on all ranks: values are summed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from gradcomp.compress.base import Traits
from gradcomp.compress.messages import Bytes, Exchange, Sum
from gradcomp.compress.sparse.base import ByDensity, keep_errors
from gradcomp.compress.sparse.payload import Selection
from gradcomp.kernels import indices, selection
from gradcomp.kernels.codec import Group, Sizes
from gradcomp.kernels.step import StepContext

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Summed(ByDensity):
    """Base of the compressors that send k = round(density n) elements of each layer, at least one, equal on all ranks.

    p = scale g + decay e on every rank; indices S that all ranks know; mean = (1/N) sum over ranks of p restricted to
    S; e' = p outside of S, and inside p minus what was sent, which is 0 unless values are weighted. The level is the
    density.

    The last message is a Sum of 4k bytes per layer: 8k (N - 1) / N bytes per rank with a ring, however many ranks.
    Layers are never cut into slices.
    """

    @cached_property
    def traits(self) -> Traits:
        return Traits(contributes=True)

    def wire_bytes(self, group: Group) -> Sizes:
        return 4 * self.limits(group.table)

    def weigh(self, group: Group, values: Floats) -> Floats:
        """Return what is sent for the values of p at the selected indices."""
        return values

    def sum_at(
        self, group: Group, context: StepContext, chosen: Selection, prepare: Callable[[], Bytes]
    ) -> Exchange:
        """Ask for one Sum of all ranks' values at the indices of ``chosen``.

        ``prepare`` writes those indices, and p to the next residuals; it returns the rows that are not finite.
        """
        table = group.inputs

        def write(view: Floats) -> Bytes:
            flags = prepare()
            selection.take(table, chosen.offsets, chosen.counts, chosen.indices, chosen.values)
            with np.errstate(all="ignore"):
                view[:] = self.weigh(group, chosen.values)
                keep_errors(group, chosen, chosen.values - view)
            view[np.repeat(flags != 0, chosen.counts)] = np.nan
            return flags

        reply = yield Sum(len(chosen.values), write)
        flags = reply.flags.copy()
        indices.scatter_values(
            group.table,
            flags,
            chosen.offsets,
            chosen.counts,
            chosen.indices,
            reply.data,
            divisor=context.divisor,
            scale=context.unscale,
        )
        return flags
