"""Sparse values scattered over dense outputs: the same bytes from every backend, and from one scalar at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernels.backends import ALL, COMPILED, each_of
from kernels.groups import AWKWARD, GuardedArray
from kernels.isas import NATIVE
from kernels.standin import ORDERS, cuda_backend
from tiers import examples

from gradcomp.kernels import reference_indices, segments

BACKEND = each_of(ALL)
CUDA = [cuda_backend(order) for order in ORDERS.values()]
DTYPES = (segments.FLOAT32, segments.FLOAT16, segments.BFLOAT16)
DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "float16", "bfloat16"])
EACH = each_of(COMPILED)


@dataclass
class Lists:
    """Segments, and for each rank and segment the indices and values of a list."""

    lengths: Sequence[int]
    dtypes: Sequence[int]
    lists: Sequence[Sequence[tuple[Any, Any]]]  # [rank][segment]
    flags: Sequence[int] | None = None
    skipped: Sequence[int] = ()  # segments without an output
    columns: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        flat = [pair for rank in self.lists for pair in rank]
        shape = (len(self.lists), len(self.lengths))
        counts = np.array([len(listed) for listed, _ in flat], np.int64)
        self.columns = {
            "offsets": (np.cumsum(counts) - counts).reshape(shape),
            "counts": counts.reshape(shape),
            "indices": np.concatenate([np.empty(0), *(listed for listed, _ in flat)]).astype(np.uint32),
            "values": np.concatenate([np.empty(0), *(values for _, values in flat)]).astype(np.float32),
        }

    def targets(self) -> tuple[Any, Any, list[Any]]:
        """Table, flags and outputs, which are NaN between elements of NaN."""
        table = np.zeros(len(self.lengths), segments.SEGMENT)
        table["length"], table["dtype"] = self.lengths, self.dtypes
        outputs = [
            GuardedArray(length, segments.DTYPES[dtype]).array
            for length, dtype in zip(self.lengths, self.dtypes, strict=True)
        ]
        for i, output in enumerate(outputs):
            if i not in self.skipped:
                table[i]["output"] = output.ctypes.data
        return table, np.array([0] * len(table) if self.flags is None else self.flags, np.uint8), outputs

    def scatter(
        self,
        backend: Any,
        *,
        divisor: float = 1.0,
        scale: float = 1.0,
        name: str = "scatter_mean",
        **changed: Any,
    ) -> tuple[list[int], list[Any]]:
        """Flags and outputs."""
        table, flags, outputs = self.targets()
        columns = self.columns | changed
        getattr(backend, name)(table, flags, *columns.values(), divisor=divisor, scale=scale)
        for output in outputs:
            assert np.isnan(output.base[[0, -1]].astype(np.float64)).all(), "written beyond the output"
        return flags.tolist(), outputs


def same(a: tuple[list[int], list[Any]], b: tuple[list[int], list[Any]]) -> bool:
    """Equal flags and bytes; one NaN is as good as another."""
    for outputs in (a[1], b[1]):
        for output in outputs:
            output[np.isnan(output)] = np.nan
    return a[0] == b[0] and [x.tobytes() for x in a[1]] == [x.tobytes() for x in b[1]]


def one_by_one(lists: Lists, divisor: float, scale: float) -> tuple[list[int], list[Any]]:
    """The mean, element by element."""
    flags, outputs = [], []
    for i, length in enumerate(lists.lengths):
        totals: dict[int, np.float32] = {}
        with np.errstate(all="ignore"):
            for rank in lists.lists:
                for index, value in zip(*rank[i], strict=True):
                    totals[int(index)] = totals.get(int(index), np.float32(0)) + np.float32(value)
            output = np.zeros(length, segments.DTYPES[lists.dtypes[i]])
            for index, total in totals.items():
                output[index] = total / np.float32(divisor) * np.float32(scale)
        flags.append(int(not np.isfinite(output.astype(np.float32)).all()))
        outputs.append(output)
    return flags, outputs


def draw_lists(
    ranks: int, lengths: Sequence[int], dtypes: Sequence[int], density: float, seed: int = 0
) -> Lists:
    rng = np.random.default_rng(seed)

    def one(length: int) -> tuple[Any, Any]:
        listed = np.flatnonzero(rng.random(length) < density)
        return listed, rng.normal(size=len(listed)).astype(np.float32)

    return Lists(lengths, dtypes, [[one(length) for length in lengths] for _ in range(ranks)])


LENGTHS = (0, 1, 2, 15, 16, 17, 100, 2047, 2048, 2049, 4096, 5000)


@BACKEND
@DTYPE
@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_mean(backend: Any, dtype: int, ranks: int) -> None:
    lists = draw_lists(ranks, LENGTHS[:7], [dtype] * 7, density=0.4)
    found = lists.scatter(backend, divisor=ranks, scale=0.7)
    assert same(found, one_by_one(lists, ranks, 0.7))
    assert found[0] == [0] * 7
    assert any(output.any() for output in found[1])


@EACH
@pytest.mark.parametrize("ranks", [0, 1, 2, 3, 7])
@pytest.mark.parametrize("density", [0.0, 0.0005, 0.01, 0.5, 1.0])
def test_backends_agree(backend: Any, ranks: int, density: float) -> None:
    lists = draw_lists(ranks, LENGTHS * 3, np.repeat(DTYPES, len(LENGTHS)).tolist(), density)
    for divisor, scale in [(1.0, 1.0), (2.0, 1.0), (3.0, 0.3)]:
        expected = lists.scatter(reference_indices, divisor=divisor, scale=scale)
        assert same(lists.scatter(backend, divisor=divisor, scale=scale), expected)


@EACH
@DTYPE
def test_long_segments_at_every_alignment(backend: Any, dtype: int) -> None:
    # Long enough for stores that pass the cache by, with stretches of many blocks that no list reaches.
    length = (1 << 16) + 100
    for offset in range(0, 16, 3):
        rng = np.random.default_rng(offset)
        listed = [np.unique(rng.integers(begin, begin + 3000, 200)) for begin in (0, 40_000, length - 3000)]
        lists = Lists(
            [offset, length], [dtype] * 2, [[([], []), (x, rng.normal(size=len(x)))] for x in listed]
        )
        assert same(lists.scatter(backend, divisor=3.0), lists.scatter(reference_indices, divisor=3.0))


@examples(200)
@given(data=st.data())
def test_any_numbers(data: Any) -> None:
    length = data.draw(st.integers(0, 40))
    numbers = st.one_of(st.sampled_from(AWKWARD), st.floats(width=32), st.floats(-10, 10, width=32))

    def one() -> tuple[Any, Any]:
        listed = sorted(data.draw(st.sets(st.integers(0, length - 1)))) if length else []
        return listed, data.draw(st.lists(numbers, min_size=len(listed), max_size=len(listed)))

    dtype = data.draw(st.sampled_from(DTYPES))
    lists = Lists([length], [dtype], [[one()] for _ in range(data.draw(st.integers(0, 4)))])
    # Around the powers of two whose inverse is a normal number.
    divisors = [1.0, 2.0, 3.0, 7.0, 0.75, 2.0**126, 2.0**127, 2.0**-126, 2.0**-127, 2.0**-149, np.inf]
    divisor = data.draw(st.sampled_from(divisors))
    scale = data.draw(st.sampled_from([1.0, 0.1, 0.0, 1e30, 2.0**-140]))
    expected = one_by_one(lists, divisor, scale)
    for backend in (reference_indices, NATIVE, *CUDA):
        assert same(lists.scatter(backend, divisor=divisor, scale=scale), expected)


@BACKEND
@pytest.mark.parametrize(
    ("dtype", "value", "overflows"),
    [
        (segments.FLOAT32, 3e38, False),
        (segments.FLOAT32, np.inf, True),
        (segments.FLOAT32, np.nan, True),
        (segments.FLOAT16, 65519.0, False),
        (segments.FLOAT16, 65520.0, True),
        (segments.BFLOAT16, 3.38e38, False),
        (segments.BFLOAT16, 3.4e38, True),
    ],
)
def test_overflow_sets_the_flag_of_its_segment(
    backend: Any, dtype: int, value: float, overflows: bool
) -> None:
    lists = Lists([3, 3000, 3], [dtype] * 3, [[([1], [1.0]), ([2999], [value]), ([], [])]])
    flags, outputs = lists.scatter(backend)
    assert flags == [0, int(overflows), 0]
    assert np.isfinite(outputs[1].astype(np.float32)[2999]) == (not overflows)
    assert not outputs[1][:2999].any()


@BACKEND
@DTYPE
def test_flagged_segments_become_nan_and_their_lists_are_not_looked_at(backend: Any, dtype: int) -> None:
    good = ([1], [5.0])
    lists = Lists([3, 3], [dtype] * 2, [[good, ([9, 2], [1.0, 1.0])], [good, good]], flags=[0, 7])
    flags, (first, second) = lists.scatter(backend, offsets=np.array([[0, 99], [3, -5]]))
    assert flags == [0, 7]
    assert first.tolist() == [0, 10, 0]
    assert np.isnan(second).all()


@BACKEND
def test_rows_without_output_are_skipped_unchecked(backend: Any) -> None:
    lists = Lists([3, 2], [segments.FLOAT32] * 2, [[([1], [5.0]), ([9, 2], [1.0, 1.0])]], skipped=[1])
    flags, (first, second) = lists.scatter(backend, offsets=np.array([[0, -1]]))
    assert flags == [0, 0]
    assert first.tolist() == [0, 5, 0]
    assert np.isnan(second).all()
