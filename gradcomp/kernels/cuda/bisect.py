"""RedSync's search for thresholds on a GPU, whose passes do not wait for the host."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gradcomp.kernels.cuda.call import THREADS, Call, tiles
from gradcomp.kernels.cuda.layout import Source
from gradcomp.kernels.cuda.prepared import Kernels, fixed_columns
from gradcomp.kernels.cuda.row_sums import RowSums
from gradcomp.kernels.segments import SegmentTable

_TILE = 16384

Sizes = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


class BisectKernels(Kernels):
    """RedSync's search for thresholds. Its reference is in no module of `reference`."""

    def bisect(self, table: SegmentTable, wanted: Sizes, most: Sizes, passes: int) -> Floats:
        """Returns a threshold for each row, which ``wanted`` to ``most`` of its magnitudes reach, by RedSync's search.

        The search reads the next residuals, which must be float32 and finite: once for the mean and the largest
        magnitude, then up to ``passes`` times, until the row's threshold is found.
        """
        found = np.zeros(len(table), dtype=np.float32)
        key = ("bisect", fixed_columns(table), passes)
        arrays = (table, wanted, most, found)
        self._plans.run(key, lambda call: _write_bisect(call, arrays, passes), arrays)
        return found


def _write_bisect(call: Call, arrays: tuple[SegmentTable, Sizes, Sizes, Floats], passes: int) -> None:
    table, wanted, most, found = arrays
    rows = len(table)
    begins = tiles(-(-table["length"] // _TILE))
    thresholds = call.result(found, Source(3), zero=True)
    counts, high = call.workspace(8 * rows, zero=True), call.workspace(4 * rows, zero=True)
    sums, squares = call.workspace(8 * rows), call.workspace(8 * rows)
    parts = RowSums(call, table, 2, Source(0))
    call.launch("sums.cu", "tail", parts.blocks, *parts.rows, parts.sums, thresholds, counts, high)
    parts.join(sums, squares)
    each = -(-rows // THREADS)
    parameters = (
        *(parts.table, call.give(begins), rows, call.give(wanted, Source(1)), call.give(most, Source(2))),
        *(counts, sums, high, thresholds),
        *(call.workspace(4 * rows), call.workspace(8 * rows, zero=True)),
    )
    call.launch("bisect.cu", "bisect_begin", each, *parameters)
    for _ in range(passes):
        call.launch("bisect.cu", "bisect_count", int(begins[-1]), *parameters)
        call.launch("bisect.cu", "bisect_decide", each, *parameters)
