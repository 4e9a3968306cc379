"""Measurements where the values lie: sums, samples, and the losses of codes of many levels."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gradcomp.kernels.cuda.call import THREADS, Call, tiles
from gradcomp.kernels.cuda.codes import encoders_of, find_largest, rounding
from gradcomp.kernels.cuda.prepared import Kernels
from gradcomp.kernels.reference_checksum import Words, sample_of
from gradcomp.kernels.segments import STOCHASTIC, UNIT_BYTES, Draw, Magnitudes, SegmentTable

Doubles = npt.NDArray[np.float64]

_TEAMS = THREADS // 16
_PER_BLOCK = THREADS * 64  # elements that a block of moments.cu sums
_MOST_LEVELS = 32

LARGEST_BUCKET = 8192
"""The most elements of a bucket that sixteen threads read, level after level."""


class MeasureKernels(Kernels):
    """The kernels losses and moments, with float64 sums in an order of their own, and sample, which sums integers."""

    def losses(
        self,
        codec: int,
        table: SegmentTable,
        bits: npt.NDArray[np.int32],
        *,
        draw: Draw | None,
        magnitudes: Magnitudes | None = None,
    ) -> Doubles:
        """Returns, for (rows, levels), sums of (g - decode(encode(g)))^2, inf where a scale would not be finite.

        It reads the gradients once for up to 32 levels, and once before where scales have a unit, which is that of
        whole rows; buckets have at most LARGEST_BUCKET elements. ``bits`` replaces the table's levels; ``draw`` is
        that of :func:`gradcomp.kernels.reference.encode`.
        """
        size = np.minimum(table["bucket_size"], np.maximum(table["length"], 1))
        if size.max(initial=1) > LARGEST_BUCKET:
            raise ValueError(f"a bucket has more than {LARGEST_BUCKET} elements")
        found = np.zeros((len(table), len(bits)))
        buckets = -(-table["length"] // size)
        begins = tiles(-(-buckets // _TEAMS))
        call = Call(self._plans.driver)
        rows, where = call.give(table), call.give(begins)
        scales = 0 if magnitudes is None else call.give(magnitudes)
        drawn = draw is not None and codec in STOCHASTIC
        words = (0, 0, 0) if draw is None else (draw.seed, draw.step, draw.rank)
        parts = []
        largest = call.workspace(4 * len(table), zero=True) if codec in UNIT_BYTES else 0
        for name, members in encoders_of(codec, bits, drawn):
            if codec in UNIT_BYTES:
                find_largest(call, name, "encode", table, rows, (0, 0, 0, largest, 0, 0, 0, 1.0, 1.0, 1.0))
            for first in range(0, len(members), _MOST_LEVELS):
                levels = members[first : first + _MOST_LEVELS]
                partial = np.zeros((int(begins[-1]), len(levels)))
                parts.append((levels, partial))
                call.launch(
                    "losses.cu",
                    f"losses_{rounding(drawn)}",
                    int(begins[-1]),
                    *(rows, where, len(table)),
                    *(call.give(bits[levels]), len(levels), call.result(partial), scales, largest),
                    *(*words, 1.0, 1.0),
                    defines={"GRADCOMP_CLASS": name},
                )
        call.run()
        for levels, partial in parts:
            found[:, levels] = _by_row(partial, begins)
        return found

    def sample(self, table: SegmentTable, values: Words, *, turn: int) -> None:
        """Runs `reference_checksum.sample`; a tile takes 256 blocks of elements."""
        begins = tiles(-(-sample_of(table["length"])[2] // THREADS))
        call = Call(self._plans.driver)
        call.launch(
            "sample.cu",
            "sample",
            int(begins[-1]),
            *(call.give(table), call.give(begins), len(table), call.result(values, zero=True), turn),
        )
        call.run()

    def moments(self, table: SegmentTable) -> Doubles:
        """Returns, for (rows, 2), the sum of the gradient's elements and that of their squares."""
        begins = tiles(-(-table["length"] // _PER_BLOCK))
        partial = np.zeros((int(begins[-1]), 2))
        call = Call(self._plans.driver)
        call.launch(
            "moments.cu",
            "moments",
            int(begins[-1]),
            *(call.give(table), call.give(begins), len(table), call.result(partial)),
        )
        call.run()
        return _by_row(partial, begins)


def _by_row(partial: Doubles, begins: npt.NDArray[np.int64]) -> Doubles:
    """Returns the sums of each row's tiles."""
    found: Doubles = np.zeros((len(begins) - 1, partial.shape[1]))
    filled = np.flatnonzero(np.diff(begins))
    if filled.size:
        found[filled] = np.add.reduceat(partial, begins[filled], axis=0)
    return found
