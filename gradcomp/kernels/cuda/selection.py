"""The kernels of sparse selections on a GPU; :mod:`gradcomp.kernels.reference_selection` defines what each computes.

Shadows, gradients and residuals are memory that the device reaches; indices and values may lie on either side.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gradcomp.kernels.cuda.call import Call, Parameter, Ref, groups, tiles
from gradcomp.kernels.cuda.driver import Driver
from gradcomp.kernels.cuda.places import check_flat, lists_to_read, lists_to_write
from gradcomp.kernels.cuda.radix import Marks, RadixSelect
from gradcomp.kernels.cuda.row_sums import RowSums
from gradcomp.kernels.reference_selection import (
    Doubles,
    Floats,
    Indices,
    Numbers,
    _check_counts,
    _check_inside,
    _check_narrow,
    _check_rows,
    _check_shadows,
)
from gradcomp.kernels.segments import Bytes, SegmentTable, _require

_ITEMS = 2048  # items of a list that a block of lists.cu serves


class SelectionKernels:
    """The kernels of `reference_selection`, and select_adacomp."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def contribute(self, table: SegmentTable, flags: Bytes, factors: Floats, *, decay: float) -> None:
        """See `reference_selection.contribute`."""
        _check_rows(table, flags=(flags, np.uint8, True), factors=(factors, np.float32, False))
        _check_narrow(table)
        _check_shadows(table)
        bad = np.zeros(len(table), dtype=np.uint8)
        call = Call(self._driver)
        RadixSelect(call, table, factors=factors, decay=decay, bad=call.result(bad, zero=True)).contribute()
        call.run()
        flags |= bad

    def squares(self, table: SegmentTable, out: Doubles) -> None:
        """See `reference_selection.squares`."""
        _check_rows(table, out=(out, np.float64, True))
        call = Call(self._driver)
        sums = RowSums(call, table, 1)
        call.launch("sums.cu", "squares", sums.blocks, *sums.rows, sums.sums)
        sums.join(call.result(out))
        call.run()

    def select_top(
        self,
        table: SegmentTable,
        flags: Bytes,
        factors: Floats,
        counts: Numbers,
        offsets: Numbers,
        indices: Indices,
        values: Floats,
        *,
        decay: float,
    ) -> None:
        """See `reference_selection.select_top`."""
        _check_rows(
            table,
            flags=(flags, np.uint8, True),
            factors=(factors, np.float32, False),
            counts=(counts, np.int64, False),
            offsets=(offsets, np.int64, False),
        )
        _check_narrow(table)
        _check_shadows(table)
        _check_counts(table, counts)
        _check_flat(table, offsets, counts, indices, values, selecting=True)
        bad = np.zeros(len(table), dtype=np.uint8)
        call = Call(self._driver)
        selection = RadixSelect(
            call,
            table,
            factors=factors,
            decay=decay,
            bad=call.result(bad, zero=True),
            wanted=counts,
        )
        selection.find(contributing=True)
        selection.write(offsets, counts, indices, values)
        call.run()
        flags |= bad

    def select_above(
        self,
        table: SegmentTable,
        thresholds: Floats,
        limits: Numbers,
        offsets: Numbers,
        indices: Indices,
        values: Floats,
        found: Numbers,
    ) -> None:
        """See `reference_selection.select_above`."""
        _check_rows(
            table,
            thresholds=(thresholds, np.float32, False),
            limits=(limits, np.int64, False),
            offsets=(offsets, np.int64, False),
            found=(found, np.int64, True),
        )
        _check_shadows(table)
        _check_flat(table, offsets, limits, indices, values, selecting=True)
        # Nothing has the key of NaN, and everything has one of at least 0.
        cuts = np.where(thresholds > 0, thresholds, np.float32(0)).view(np.int32)
        cuts[np.isnan(thresholds)] = np.iinfo(np.int32).max
        call = Call(self._driver)
        selection = RadixSelect(call, table, wanted=limits, cuts=cuts)
        selection.find()
        selection.write(offsets, limits, indices, values, found)
        call.run()

    def select_adacomp(
        self,
        table: SegmentTable,
        factors: Floats,
        limits: Numbers,
        offsets: Numbers,
        indices: Indices,
        values: Floats,
        found: Numbers,
        *,
        bin_size: int,
    ) -> None:
        """See `reference_adacomp.select_adacomp`."""
        _check_rows(
            table,
            factors=(factors, np.float32, False),
            limits=(limits, np.int64, False),
            offsets=(offsets, np.int64, False),
            found=(found, np.int64, True),
        )
        _check_narrow(table)
        _check_shadows(table)
        _check_flat(table, offsets, limits, indices, values, selecting=True)
        if bin_size < 1:
            raise ValueError(f"bin_size {bin_size} is not positive")
        call = Call(self._driver)
        length = table["length"].astype(np.int64)
        bin_size = min(bin_size, max(int(length.max(initial=0)), 1))
        begins = tiles(-(-length // bin_size))
        marks = Marks(call, table)
        blocks = tiles(groups(table))
        parameters = (
            *(call.give(table), call.give(blocks), len(table), call.give(factors), bin_size),
            *(call.give(begins), call.room(4 * int(begins[-1]), zero=True), marks.begins, marks.bits),
        )
        for name in ("maxima", "mark"):
            call.launch("adacomp.cu", name, int(blocks[-1]), *parameters)
        selection = RadixSelect(call, table, wanted=limits, candidates=marks)
        selection.find()
        selection.write(offsets, limits, indices, values, found)
        call.run()

    def sample_thresholds(
        self, table: SegmentTable, counts: Numbers, thresholds: Floats, *, stride: int, phase: int
    ) -> None:
        """See `reference_selection.sample_thresholds`."""
        _check_rows(table, counts=(counts, np.int64, False), thresholds=(thresholds, np.float32, True))
        _check_shadows(table)
        _check_counts(table, counts)
        if stride < 1 or phase < 0:
            raise ValueError(f"stride {stride} is not positive, or phase {phase} is negative")
        length = table["length"].astype(np.int64)
        # Beyond the longest row, one is like another.
        longest = int(length.max(initial=0))
        stride, phase = min(stride, longest + 1), min(phase, longest)
        sampled = phase < length
        sample = table.copy()
        sample["shadow"] += np.where(sampled, np.uint64(4 * phase), np.uint64(0))
        sample["length"] = np.where(sampled, -(-(length - phase) // stride), length)
        size = sample["length"].astype(np.float64)
        share = np.rint(counts.astype(np.float64) * size / np.maximum(length, 1).astype(np.float64))
        ranks = np.minimum(np.maximum(share.astype(np.int64), 1), sample["length"])
        strides = np.where(sampled, stride, 1)
        call = Call(self._driver)
        selection = RadixSelect(
            call, sample, wanted=np.where(counts == 0, 0, ranks), strides=strides, nan_is_infinite=True
        )
        selection.find()
        selection.thresholds(thresholds)
        call.run()

    def tail(
        self,
        table: SegmentTable,
        thresholds: Floats,
        counts: Numbers,
        sums: Doubles,
        squares_out: Doubles,
        maxima: Floats,
    ) -> None:
        """See `reference_selection.tail`."""
        _check_rows(
            table,
            thresholds=(thresholds, np.float32, False),
            counts=(counts, np.int64, True),
            sums=(sums, np.float64, True),
            squares_out=(squares_out, np.float64, True),
            maxima=(maxima, np.float32, True),
        )
        _check_shadows(table)
        call = Call(self._driver)
        parts = RowSums(call, table, 2)
        found = (call.result(each, zero=True) for each in (counts, maxima))
        call.launch("sums.cu", "tail", parts.blocks, *parts.rows, parts.sums, call.give(thresholds), *found)
        parts.join(call.result(sums), call.result(squares_out))
        call.run()

    def take(
        self, table: SegmentTable, offsets: Numbers, counts: Numbers, indices: Indices, values: Floats
    ) -> None:
        """See `reference_selection.take`."""
        _check_lists(table, offsets, counts, indices, values, taking=True)
        call = Call(self._driver)
        _Lists(call, table, offsets, counts, indices).take(values)

    def put(
        self, table: SegmentTable, offsets: Numbers, counts: Numbers, indices: Indices, values: Floats
    ) -> None:
        """See `reference_selection.put`."""
        _check_lists(table, offsets, counts, indices, values, taking=False)
        _require(table, counts < 1 << 32, "the selection has more than 2**32 - 1 items")
        call = Call(self._driver)
        _Lists(call, table, offsets, counts, indices).put(values)


class _Lists:
    """The launches of lists.cu for one table."""

    def __init__(
        self, call: Call, table: SegmentTable, offsets: Numbers, counts: Numbers, indices: Indices
    ) -> None:
        begins = tiles(-(-counts // _ITEMS))
        self._call, self._table, self._offsets, self._counts = call, table, offsets, counts
        self._blocks = int(begins[-1])
        self._bad = np.zeros(1, dtype=np.uint32)
        self._lists: tuple[Parameter, ...] = (
            *(call.give(table), call.give(begins), len(table), call.give(offsets), call.give(counts)),
            lists_to_read(call, indices, offsets, counts),
        )
        self._found: Ref = call.result(self._bad, zero=True)

    def take(self, values: Floats) -> None:
        # What is there stays if an index is refused.
        into = lists_to_write(self._call, values, self._offsets, self._counts, all_of_it=False)
        for name in ("check", "take"):
            self._call.launch("lists.cu", name, self._blocks, *self._lists, into, self._found, 0, 0)
        self._run()

    def put(self, values: Floats) -> None:
        """Of a repeated index the last value stays: only rows that have one take more than a look."""
        call = self._call
        repeated = call.room(len(self._table), zero=True)
        first = int(self._offsets.min(initial=0))
        last = call.room(int((self._offsets + self._counts).max(initial=0)) - first).part(-first)
        source = lists_to_read(call, values, self._offsets, self._counts)
        for name in ("check", "clear", "claim", "decide", "put"):
            call.launch("lists.cu", name, self._blocks, *self._lists, source, self._found, repeated, last)
        self._run()

    def _run(self) -> None:
        self._call.run()
        if self._bad[0]:
            first = len(self._table) - int(self._bad[0])
            raise ValueError(f"an index is not below the row's length: {self._table[first]}")


def _check_flat(
    table: SegmentTable, offsets: Numbers, counts: Numbers, indices: Any, values: Any, *, selecting: bool
) -> None:
    check_flat("indices", indices, np.uint32, writable=selecting)
    check_flat("values", values, np.float32, writable=selecting)
    _check_inside(table, offsets, counts, min(len(indices), len(values)))


def _check_lists(
    table: SegmentTable, offsets: Numbers, counts: Numbers, indices: Any, values: Any, *, taking: bool
) -> None:
    """All but the indices themselves, which kernels check."""
    check_flat("indices", indices, np.uint32)
    check_flat("values", values, np.float32, writable=taking)
    _check_rows(table, offsets=(offsets, np.int64, False), counts=(counts, np.int64, False))
    _check_shadows(table)
    _check_inside(table, offsets, counts, min(len(indices), len(values)))
