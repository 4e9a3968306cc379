"""The kernels of sparse selections on a GPU; :mod:`gradcomp.kernels.reference_selection` defines them.

Next residuals, gradients and residuals are memory that the device reaches; indices and values may lie on either side.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np

from gradcomp.kernels.cuda.call import Call, check_flat, groups, tiles, to_read, to_write
from gradcomp.kernels.cuda.layout import Parameter, Real, Source
from gradcomp.kernels.cuda.prepared import Kernels, fixed_columns, place_of
from gradcomp.kernels.cuda.radix import Contribution, Marks, RadixSelect
from gradcomp.kernels.cuda.row_sums import RowSums
from gradcomp.kernels.reference_selection import (
    check_counts,
    check_inside,
    check_narrow,
    check_next_residuals,
    check_vectors,
)
from gradcomp.kernels.segments import Bytes, Doubles, Floats, Indices, SegmentTable, Sizes, require_rows

_ITEMS = 2048  # items that a block of lists.cu serves of a list


class SelectionKernels(Kernels):
    """The kernels of `reference_selection`, under the same names."""

    def contribute(self, table: SegmentTable, flags: Bytes, factors: Floats, *, decay: float) -> None:
        check_vectors(table, flags=(flags, np.uint8, True), factors=(factors, np.float32, False))
        check_narrow(table)
        check_next_residuals(table)
        bad = np.zeros(len(table), dtype=np.uint8)

        def write_down(call: Call) -> None:
            given = call.give(factors, Source(1))
            found = call.result(bad, Source(2), zero=True)
            RadixSelect(call, table, Contribution(given, Real(0), found)).contribute()

        key = ("contribute", fixed_columns(table))
        self._plans.run(key, write_down, (table, factors, bad), (float(decay),), (flags, bad))

    def squares(self, table: SegmentTable, out: Doubles) -> None:
        check_vectors(table, out=(out, np.float64, True))

        def write_down(call: Call) -> None:
            sums = RowSums(call, table, 1, Source(0))
            call.launch("sums.cu", "squares", sums.blocks, *sums.rows, sums.sums)
            sums.join(call.result(out, Source(1)))

        self._plans.run(("squares", fixed_columns(table)), write_down, (table, out))

    def select_top(
        self,
        table: SegmentTable,
        flags: Bytes,
        factors: Floats,
        counts: Sizes,
        offsets: Sizes,
        indices: Indices,
        values: Floats,
        found: Sizes,
        *,
        decay: float,
        zeros: bool,
    ) -> None:
        check_vectors(
            table,
            flags=(flags, np.uint8, True),
            factors=(factors, np.float32, False),
            counts=(counts, np.int64, False),
            offsets=(offsets, np.int64, False),
            found=(found, np.int64, True),
        )
        check_narrow(table)
        check_next_residuals(table)
        _check_flat(indices, values, selecting=True)
        bad = np.zeros(len(table), dtype=np.uint8)
        limits = counts.copy()  # found may be the same array

        def write_down(call: Call) -> None:
            check_counts(table, limits)
            check_inside(table, offsets, limits, min(len(indices), len(values)))
            rows = call.result(bad, Source(2), zero=True)
            contribution = Contribution(call.give(factors, Source(1)), Real(0), rows)
            cuts = 0 if zeros else call.give(np.ones(len(table), dtype=np.int32))
            selection = RadixSelect(call, table, contribution, wanted=call.give(limits), cuts=cuts)
            selection.find(contributing=True)
            if not zeros:
                _write_some(call, selection, offsets, limits, indices, values, call.result(found, Source(5)))
                return
            index_list, value_list = (
                to_write(call, each, i, offsets, limits) for i, each in ((3, indices), (4, values))
            )
            selection.write(call.give(offsets), index_list, value_list)

        key = ("top", zeros, fixed_columns(table), *_lists_key(offsets, limits, indices, values))
        # With zeros the numbers of selected elements are known beforehand, and are not read back.
        arrays = (
            (table, factors, bad, indices, values) if zeros else (table, factors, bad, indices, values, found)
        )
        self._plans.run(key, write_down, arrays, (float(decay),), (flags, bad))
        if zeros:
            found[:] = limits

    def select_above(
        self,
        table: SegmentTable,
        thresholds: Floats,
        limits: Sizes,
        offsets: Sizes,
        indices: Indices,
        values: Floats,
        found: Sizes,
    ) -> None:
        check_vectors(
            table,
            thresholds=(thresholds, np.float32, False),
            limits=(limits, np.int64, False),
            offsets=(offsets, np.int64, False),
            found=(found, np.int64, True),
        )
        check_next_residuals(table)
        _check_flat(indices, values, selecting=True)
        # A threshold of NaN gets a key above that of every element, and one below 0 gets the least key, 0.
        cuts = np.where(thresholds > 0, thresholds, np.float32(0)).view(np.int32)
        cuts[np.isnan(thresholds)] = np.iinfo(np.int32).max

        def write_down(call: Call) -> None:
            check_inside(table, offsets, limits, min(len(indices), len(values)))
            given = call.give(cuts, Source(1))
            selection = RadixSelect(call, table, wanted=call.give(limits), cuts=given)
            selection.find()
            _write_some(call, selection, offsets, limits, indices, values, call.result(found, Source(2)))

        key = ("above", fixed_columns(table), *_lists_key(offsets, limits, indices, values))
        self._plans.run(key, write_down, (table, cuts, found, indices, values))

    def select_adacomp(
        self,
        table: SegmentTable,
        factors: Floats,
        limits: Sizes,
        offsets: Sizes,
        indices: Indices,
        values: Floats,
        found: Sizes,
        *,
        bin_size: int,
    ) -> None:
        check_vectors(
            table,
            factors=(factors, np.float32, False),
            limits=(limits, np.int64, False),
            offsets=(offsets, np.int64, False),
            found=(found, np.int64, True),
        )
        check_narrow(table)
        check_next_residuals(table)
        _check_flat(indices, values, selecting=True)
        if bin_size < 1:
            raise ValueError(f"bin_size {bin_size} is not positive")
        bin_size = min(bin_size, max(int(table["length"].max(initial=0)), 1))

        def write_down(call: Call) -> None:
            check_inside(table, offsets, limits, min(len(indices), len(values)))
            marks = _mark_bins(call, table, call.give(factors, Source(1)), bin_size)
            selection = RadixSelect(call, table, wanted=call.give(limits), candidates=marks)
            selection.find()
            _write_some(call, selection, offsets, limits, indices, values, call.result(found, Source(2)))

        key = ("adacomp", bin_size, fixed_columns(table), *_lists_key(offsets, limits, indices, values))
        self._plans.run(key, write_down, (table, factors, found, indices, values))

    def sample_thresholds(
        self, table: SegmentTable, counts: Sizes, thresholds: Floats, *, stride: int, phase: int
    ) -> None:
        check_vectors(table, counts=(counts, np.int64, False), thresholds=(thresholds, np.float32, True))
        check_next_residuals(table)
        check_counts(table, counts)
        if stride < 1 or phase < 0:
            raise ValueError(f"stride {stride} is not positive, or phase {phase} is negative")
        length = table["length"].astype(np.int64)
        # All strides and phases beyond the longest row have the same result.
        longest = int(length.max(initial=0))
        stride, phase = min(stride, longest + 1), min(phase, longest)
        sampled = phase < length
        sample = table.copy()
        sample["next_residual"] += np.where(sampled, np.uint64(4 * phase), np.uint64(0))
        sample["length"] = np.where(sampled, -(-(length - phase) // stride), length)
        size = sample["length"].astype(np.float64)
        share = np.rint(counts.astype(np.float64) * size / np.maximum(length, 1).astype(np.float64))
        ranks = np.minimum(np.maximum(share.astype(np.int64), 1), sample["length"])
        strides = np.where(sampled, stride, 1)
        wanted = np.where(counts == 0, 0, ranks)

        def write_down(call: Call) -> None:
            selection = RadixSelect(
                call,
                sample,
                wanted=call.give(wanted, Source(1)),
                strides=call.give(strides, Source(2)),
                nan_is_infinite=True,
            )
            selection.find()
            selection.thresholds(call.result(thresholds, Source(3)))

        key = ("sample", fixed_columns(sample))
        self._plans.run(key, write_down, (sample, wanted, strides, thresholds))

    def tail(
        self,
        table: SegmentTable,
        thresholds: Floats,
        counts: Sizes,
        sums: Doubles,
        squares_out: Doubles,
        maxima: Floats,
    ) -> None:
        check_vectors(
            table,
            thresholds=(thresholds, np.float32, False),
            counts=(counts, np.int64, True),
            sums=(sums, np.float64, True),
            squares_out=(squares_out, np.float64, True),
            maxima=(maxima, np.float32, True),
        )
        check_next_residuals(table)

        def write_down(call: Call) -> None:
            parts = RowSums(call, table, 2, Source(0))
            given = call.give(thresholds, Source(1))
            found = (call.result(each, Source(i), zero=True) for i, each in ((2, counts), (3, maxima)))
            call.launch("sums.cu", "tail", parts.blocks, *parts.rows, parts.sums, given, *found)
            parts.join(call.result(sums, Source(4)), call.result(squares_out, Source(5)))

        arrays = (table, thresholds, counts, maxima, sums, squares_out)
        self._plans.run(("tail", fixed_columns(table)), write_down, arrays)

    def take(
        self, table: SegmentTable, offsets: Sizes, counts: Sizes, indices: Indices, values: Floats
    ) -> None:
        self._over_lists(table, offsets, counts, indices, values, taking=True)

    def put(
        self, table: SegmentTable, offsets: Sizes, counts: Sizes, indices: Indices, values: Floats
    ) -> None:
        self._over_lists(table, offsets, counts, indices, values, taking=False)

    def _over_lists(
        self,
        table: SegmentTable,
        offsets: Sizes,
        counts: Sizes,
        indices: Indices,
        values: Floats,
        *,
        taking: bool,
    ) -> None:
        """Checks everything but the indices themselves, which kernels check."""
        _check_flat(indices, values, selecting=False, taking=taking)
        check_vectors(table, offsets=(offsets, np.int64, False), counts=(counts, np.int64, False))
        check_next_residuals(table)
        bad = np.zeros(1, dtype=np.uint32)

        def write_down(call: Call) -> None:
            check_inside(table, offsets, counts, min(len(indices), len(values)))
            lists = _Lists(call, table, offsets, counts, indices, bad)
            if taking:
                lists.take(values)
            else:
                require_rows(table, counts < 1 << 32, "the selection has more than 2**32 - 1 items")
                lists.put(values)

        def after() -> None:
            if bad[0]:
                first = table[len(table) - int(bad[0])]
                raise ValueError(f"an index is not below the row's length: {first}")

        name = "take" if taking else "put"
        key = (name, fixed_columns(table), *_lists_key(offsets, counts, indices, values))
        self._plans.run(key, write_down, (table, bad, indices, values), after=after)


class _Lists:
    """The launches of lists.cu for a run's table, indices and values."""

    def __init__(
        self, call: Call, table: SegmentTable, offsets: Sizes, counts: Sizes, indices: Indices, bad: Indices
    ) -> None:
        begins = tiles(-(-counts // _ITEMS))
        self._call, self._rows, self._offsets, self._counts = call, len(table), offsets, counts
        self._blocks = int(begins[-1])
        self._lists: tuple[Parameter, ...] = (
            *(
                call.give(table, Source(0)),
                call.give(begins),
                len(table),
                call.give(offsets),
                call.give(counts),
            ),
            to_read(call, indices, 2, offsets, counts),
        )
        self._found = call.result(bad, Source(1), zero=True)

    def take(self, values: Floats) -> None:
        # Values are copied up too, so that they do not change if an index is refused.
        into = to_write(self._call, values, 3, self._offsets, self._counts, all_of_it=False)
        for name in ("check", "take"):
            self._call.launch("lists.cu", name, self._blocks, *self._lists, into, self._found, 0, 0)

    def put(self, values: Floats) -> None:
        """Launches `put`: the last value of a repeated index stays, for which only rows with one take more passes."""
        call = self._call
        repeated = call.workspace(self._rows, zero=True)
        first = int(self._offsets.min(initial=0))
        last = call.workspace(int((self._offsets + self._counts).max(initial=0)) - first).part(-first)
        source = to_read(call, values, 3, self._offsets, self._counts)
        for name in ("check", "clear", "claim", "decide", "put"):
            call.launch("lists.cu", name, self._blocks, *self._lists, source, self._found, repeated, last)


def _mark_bins(call: Call, table: SegmentTable, factors: Parameter, bin_size: int) -> Marks:
    """Marks as candidates the elements that another gradient would make the largest of their bin."""
    begins = tiles(-(-table["length"].astype(np.int64) // bin_size))
    marks = Marks(call, table)
    blocks = tiles(groups(table))
    parameters = (
        *(call.give(table, Source(0)), call.give(blocks), len(table), factors, bin_size),
        *(call.give(begins), call.workspace(4 * int(begins[-1]), zero=True), marks.begins, marks.bits),
    )
    for name in ("maxima", "mark"):
        call.launch("adacomp.cu", name, int(blocks[-1]), *parameters)
    return marks


def _write_some(
    call: Call,
    selection: RadixSelect,
    offsets: Sizes,
    limits: Sizes,
    indices: Indices,
    values: Floats,
    found: Parameter,
) -> None:
    """Writes at most ``limits`` elements of each row into a run's arrays 3 and 4, and their number."""
    index_list, value_list = (
        to_write(call, each, i, offsets, limits, all_of_it=False) for i, each in ((3, indices), (4, values))
    )
    selection.write(call.give(offsets), index_list, value_list, found)


def _lists_key(offsets: Sizes, counts: Sizes, indices: Any, values: Any) -> tuple[Hashable, ...]:
    """Returns the part of a call's key that describes lists in flat arrays."""
    return offsets.tobytes(), counts.tobytes(), place_of(indices), place_of(values)


def _check_flat(indices: Any, values: Any, *, selecting: bool, taking: bool = False) -> None:
    check_flat("indices", indices, np.uint32, writable=selecting)
    check_flat("values", values, np.float32, writable=selecting or taking)
