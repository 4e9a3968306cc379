"""RedSync's thresholds on a GPU, without the host between passes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gradcomp.kernels.cuda.call import THREADS, Call, tiles
from gradcomp.kernels.cuda.driver import Driver
from gradcomp.kernels.cuda.row_sums import RowSums
from gradcomp.kernels.segments import SegmentTable

_TILE = 16384

Sizes = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


class BisectKernels:
    """bisect."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def bisect(self, table: SegmentTable, wanted: Sizes, most: Sizes, passes: int) -> Floats:
        """Thresholds that ``wanted`` to ``most`` of each row's magnitudes reach: what RedSync's search finds.

        Reads shadows, float32 and finite: once for the mean and the largest magnitude, then ``passes`` times, of rows
        that are not done.
        """
        rows = len(table)
        found = np.zeros(rows, dtype=np.float32)
        begins = tiles(-(-table["length"] // _TILE))
        call = Call(self._driver)
        thresholds = call.result(found, zero=True)
        counts, high = call.room(8 * rows, zero=True), call.room(4 * rows, zero=True)
        sums, squares = call.room(8 * rows), call.room(8 * rows)
        parts = RowSums(call, table, 2)
        call.launch("sums.cu", "tail", parts.blocks, *parts.rows, parts.sums, thresholds, counts, high)
        parts.join(sums, squares)
        each = -(-rows // THREADS)
        parameters = (
            *(parts.table, call.give(begins), rows, call.give(wanted), call.give(most)),
            *(counts, sums, high, thresholds),
            *(call.room(4 * rows), call.room(8 * rows, zero=True)),
        )
        call.launch("bisect.cu", "bisect_begin", each, *parameters)
        for _ in range(passes):
            call.launch("bisect.cu", "bisect_count", int(begins[-1]), *parameters)
            call.launch("bisect.cu", "bisect_decide", each, *parameters)
        call.run()
        return found
