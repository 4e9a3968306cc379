"""Writes down the calls of bits.cu, for codecs whose buckets have bits of their own.

Arrays and numbers of a run are those of :mod:`.codes`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gradcomp.kernels.cuda.call import THREADS, Call, Sizes, groups, places_of, to_read, to_write
from gradcomp.kernels.cuda.codes import (
    BAD,
    DRAWS,
    FACTORS,
    OTHERS,
    PAYLOAD,
    TABLE,
    Arrays,
    addresses_of,
    collect,
    payload_of,
    rounding,
)
from gradcomp.kernels.cuda.layout import Parameter, Real, Ref, Source
from gradcomp.kernels.cuda.prepared import source_of
from gradcomp.kernels.segments import SegmentTable, check_table, groups_of, wire_bytes_table

SOURCE = "bits.cu"
_TEAMS = THREADS // 16

Rows = npt.NDArray[np.int64]


def write_encode_bits(call: Call, codec: int, drawn: bool, arrays: Arrays) -> None:
    """Writes down encode, or reduce, of all rows of a table."""
    table, payload, bad, _, *payloads = arrays
    check_table(codec, table, *map(len, (payload, *payloads)))
    begins, sizes = table["payload"], wire_bytes_table(codec, table)
    sent = [to_read(call, each, number, begins, sizes) for number, each in enumerate(payloads, OTHERS)]
    written = to_write(call, payload, PAYLOAD, begins, sizes)
    found = call.result(bad, Source(BAD), zero=True)
    job = _Job(call, codec, table, np.arange(len(table)), len(payloads))
    stem = "reduce" if payloads else "encode"
    common: dict[str, Any] = {"draws": DRAWS, "factors": FACTORS, "payload": written}
    if payloads:
        common |= {
            "payloads": addresses_of(call, sent),
            "values": call.workspace(4 * int(table["length"].sum())),
        }
        job.launch("bits_starts", np.full(len(table), len(payloads)), **common)
        job.launch("bits_mean", groups(table), **common)
    job.launch(f"bits_{stem}_ranges", -(-job.buckets // _TEAMS), **common)
    job.launch("bits_choose", np.ones(len(table), np.int64), **common)
    size = table["bucket_size"].astype(np.int64)
    last = table["length"] - np.maximum(job.buckets - 1, 0) * size
    codes = np.maximum(job.buckets - 1, 0) * groups_of(size) + groups_of(last)
    job.launch(f"bits_{stem}_{rounding(drawn)}", -(-codes // THREADS), **common)
    job.launch("bits_records", np.ones(len(table), np.int64), **common)
    call.launch("rows.cu", "discard", len(table), job.bad, written, call.give(begins), call.give(sizes))
    collect(call, job.bad, np.arange(len(table)), found)


def write_decode_bits(call: Call, codec: int, with_output: npt.NDArray[np.bool_], arrays: Arrays) -> None:
    """Writes down decode of the chosen rows."""
    table, payload, bad, _, flags = arrays
    chosen = np.flatnonzero(with_output)
    given = payload_of(call, codec, table[chosen], payload)
    found = call.result(bad, Source(BAD), zero=True)
    job = _Job(call, codec, table, chosen, 0)
    skipped = call.give(flags[chosen], source_of(OTHERS, chosen, len(table)))
    common: dict[str, Any] = {"payload": given, "flags": skipped, "factors": (Real(0), 1.0, Real(1))}
    job.launch("bits_starts", np.ones(len(chosen), np.int64), **common)
    job.launch("bits_decode", groups(table[chosen]), **common)
    collect(call, job.bad, chosen, found)


def write_decode_add_bits(call: Call, codec: int, with_output: npt.NDArray[np.bool_], arrays: Arrays) -> None:
    """Writes down decode_add of the chosen rows."""
    table, payload, _, _ = arrays
    chosen = np.flatnonzero(with_output)
    given = payload_of(call, codec, table[chosen], payload, added=True)
    job = _Job(call, codec, table, chosen, 0)
    common: dict[str, Any] = {"payload": given, "factors": (Real(0), 1.0, 1.0)}
    job.launch("bits_starts", np.ones(len(chosen), np.int64), **common)
    job.launch("bits_decode_add", groups(table[chosen]), **common)


class _Job:
    """Some rows of a table, and the memory in which their kernels store results for the next kernels."""

    def __init__(self, call: Call, codec: int, table: SegmentTable, members: Rows, payloads: int) -> None:
        self._call, self._codec = call, codec
        rows = table[members]
        self._rows = call.give(rows, source_of(TABLE, members, len(table)))
        self._count = len(rows)
        self.buckets: Sizes = -(-rows["length"] // rows["bucket_size"].astype(np.int64))
        self.bad: Ref = call.workspace(self._count, zero=True)
        total, copies = int(self.buckets.sum()), max(payloads, 1)
        self._kept = (
            call.workspace(8 * max(total, 1) * copies),
            call.give(np.cumsum(self.buckets) - self.buckets),
            total,
            call.workspace(max(self._count, 1) * copies),
        )
        self._first_values = call.give(np.cumsum(rows["length"]) - rows["length"])

    def launch(
        self,
        name: str,
        tiles: Sizes,
        *,
        payload: Parameter,
        flags: Parameter = 0,
        values: Parameter = 0,
        payloads: Sequence[Parameter] = (0, 0),
        draws: Sequence[Parameter] = (0, 0, 0),
        factors: Sequence[Parameter],
    ) -> None:
        """Launches a kernel with one block for each of the ``tiles`` of every row."""
        places = places_of(tiles)
        scale, decay, divisor = factors
        self._call.launch(
            SOURCE,
            name,
            len(places),
            *(self._rows, self._call.give(places), self._count, payload, self.bad, flags),
            *(*self._kept, values, self._first_values, *payloads, self._codec),
            *(*draws, scale, decay, divisor),
        )
