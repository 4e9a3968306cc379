"""Sparse means on a GPU; :mod:`gradcomp.kernels.reference_indices` defines them.

Outputs are memory that the device reaches; indices and values may lie on either side.
"""

from __future__ import annotations

import numpy as np

from gradcomp.kernels.codings import Indices, Sizes
from gradcomp.kernels.cuda.call import Call, groups, tiles
from gradcomp.kernels.cuda.driver import Driver
from gradcomp.kernels.cuda.places import check_flat, lists_to_read
from gradcomp.kernels.reference_indices import _check_targets
from gradcomp.kernels.reference_selection import Floats
from gradcomp.kernels.segments import Bytes, SegmentTable

_ITEMS = 2048  # items of a list that a block checks


class ScatterKernels:
    """scatter_mean."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def scatter_mean(
        self,
        table: SegmentTable,
        flags: Bytes,
        offsets: Sizes,
        counts: Sizes,
        indices: Indices,
        values: Floats,
        *,
        divisor: float,
        scale: float,
    ) -> None:
        """See `reference_indices.scatter_mean`; lists outside the arrays are complained of before all others."""
        check_flat("indices", indices, np.uint32)
        check_flat("values", values, np.float32)
        _check_targets(table, flags, offsets, counts, divisor, scale)
        rows = np.flatnonzero(table["output"] != 0)
        part, skipped = table[rows], flags[rows]
        offsets, counts = offsets[:, rows], np.where(skipped == 0, counts[:, rows], 0)
        room = min(len(indices), len(values))
        # Written as a difference: the sum of a hostile offset and a count could wrap.
        outside = (counts < 0) | (counts > room) | (offsets < 0) | (offsets > room - counts)
        outside &= skipped == 0
        if outside.any():
            row = rows[int(np.argmax(outside.any(axis=0)))]
            raise ValueError(f"row {row}: a list does not lie inside indices and values")

        call = Call(self._driver)
        bad, refused = np.zeros(len(rows), dtype=np.uint8), np.zeros(1, dtype=np.uint32)
        begins, lists = tiles(groups(part)), tiles(-(-counts.reshape(-1) // _ITEMS))
        parameters = (
            *(call.give(part), call.give(begins), len(rows)),
            *(call.give(skipped), call.result(bad, zero=True)),
            *(call.give(lists), len(offsets), call.give(offsets), call.give(counts)),
            *(
                lists_to_read(call, each, offsets.reshape(-1), counts.reshape(-1))
                for each in (indices, values)
            ),
            *(call.result(refused, zero=True), float(divisor), float(scale)),
        )
        call.launch("scatter.cu", "check_lists", int(lists[-1]), *parameters)
        call.launch("scatter.cu", "scatter", int(begins[-1]), *parameters)
        call.run()
        if refused[0]:
            row = rows[len(rows) - int(refused[0]) // 2]
            complaint = (
                "indices are not ascending"
                if refused[0] % 2
                else f"an index is not below the length of {table['length'][row]}"
            )
            raise ValueError(f"row {row}: {complaint}")
        flags[rows] |= bad
