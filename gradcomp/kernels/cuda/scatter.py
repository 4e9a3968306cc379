"""Sparse means on a GPU; :mod:`gradcomp.kernels.reference_indices` defines them.

Outputs are memory that the device reaches; indices and values may lie on either side.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gradcomp.kernels.cuda.call import Call, check_flat, groups, tiles, to_read
from gradcomp.kernels.cuda.layout import Real, Source
from gradcomp.kernels.cuda.prepared import Kernels, fixed_columns, place_of, source_of
from gradcomp.kernels.reference_indices import check_targets
from gradcomp.kernels.segments import Bytes, Floats, Indices, SegmentTable, Sizes

_ITEMS = 2048  # items that a block checks of a list


class ScatterKernels(Kernels):
    """The kernel scatter_mean of `reference_indices`."""

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
        """Runs `reference_indices.scatter_mean`; lists outside the arrays are reported before all other faults."""
        check_flat("indices", indices, np.uint32)
        check_flat("values", values, np.float32)
        check_targets(table, flags, offsets, counts, divisor, scale)
        with_output = table["output"] != 0
        rows = np.flatnonzero(with_output)
        bad, refused = np.zeros(len(rows), dtype=np.uint8), np.zeros(1, dtype=np.uint32)

        def after() -> None:
            if refused[0]:
                row = rows[len(rows) - int(refused[0]) // 2]
                complaint = (
                    "indices are not ascending"
                    if refused[0] % 2
                    else f"an index is not below the length of {table['length'][row]}"
                )
                raise ValueError(f"row {row}: {complaint}")
            if bad.any():
                flags[rows] |= bad

        key = (
            *("scatter", fixed_columns(table), with_output.tobytes(), flags.tobytes(), len(offsets)),
            *(offsets.tobytes(), counts.tobytes(), place_of(indices), place_of(values)),
        )
        arrays = (table, bad, refused, indices, values)
        self._plans.run(
            key,
            lambda call: _write_scatter(call, rows, flags, offsets, counts, arrays),
            arrays,
            (float(divisor), float(scale)),
            after=after,
        )


def _write_scatter(
    call: Call, rows: Sizes, flags: Bytes, offsets: Sizes, counts: Sizes, arrays: tuple[Any, ...]
) -> None:
    table, bad, refused, *lists = arrays
    part, skipped = table[rows], flags[rows]
    offsets, counts = offsets[:, rows], np.where(skipped == 0, counts[:, rows], 0)
    capacity = min(map(len, lists))
    # Written as a difference: the sum of a hostile offset and a count could wrap.
    outside = (counts < 0) | (counts > capacity) | (offsets < 0) | (offsets > capacity - counts)
    outside &= skipped == 0
    if outside.any():
        row = rows[int(np.argmax(outside.any(axis=0)))]
        raise ValueError(f"row {row}: a list does not lie inside indices and values")
    begins, list_tiles = tiles(groups(part)), tiles(-(-counts.reshape(-1) // _ITEMS))
    parameters = (
        *(call.give(part, source_of(0, rows, len(table))), call.give(begins), len(rows)),
        *(call.give(skipped), call.result(bad, Source(1), zero=True)),
        *(call.give(list_tiles), len(offsets), call.give(offsets), call.give(counts)),
        *(
            to_read(call, each, number, offsets.reshape(-1), counts.reshape(-1))
            for number, each in enumerate(lists, 3)
        ),
        *(call.result(refused, Source(2), zero=True), Real(0), Real(1)),
    )
    call.launch("scatter.cu", "check_lists", int(list_tiles[-1]), *parameters)
    call.launch("scatter.cu", "scatter", int(begins[-1]), *parameters)
