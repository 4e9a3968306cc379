"""What is looked at of a layer in a turn: few elements, all of them in time, the same bytes on every device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernels import standin
from tiers import examples

from gradcomp.kernels import dispatch, segments
from gradcomp.kernels.devices import HOST
from gradcomp.kernels.reference_checksum import sample_of
from gradcomp.kernels.segments import DTYPE_NUMBERS, SEGMENT

LENGTHS = [0, 1, 255, 256, 511, 512, 5000, 65_535, 65_536, 131_071, 131_072, 200_001, 1_100_000]


def table_of(arrays: Sequence[np.ndarray[Any, Any]]) -> Any:
    table = np.zeros(len(arrays), dtype=SEGMENT)
    table["gradient"] = [array.ctypes.data if len(array) else 0 for array in arrays]
    table["length"] = [len(array) for array in arrays]
    table["dtype"] = [DTYPE_NUMBERS[array.dtype.name] for array in arrays]
    return table


def sampled(arrays: Sequence[np.ndarray[Any, Any]], turn: int) -> list[int]:
    values = np.full(len(arrays), 7, dtype=np.uint32)
    HOST.kernels.sample(table_of(arrays), values, turn=turn)
    return values.tolist()


def parameters(dtype: str) -> list[np.ndarray[Any, Any]]:
    draw = np.random.default_rng(0)
    return [draw.normal(size=length).astype(DTYPES[dtype]) for length in LENGTHS]


DTYPES = {name: np.dtype(name) if name != "bfloat16" else segments.DTYPES[2] for name in DTYPE_NUMBERS}


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_backends_give_the_same_values(dtype: str):
    arrays = parameters(dtype)
    for turn in (0, 1, 77, 2**32 - 1):
        with dispatch.use("reference"):
            want = sampled(arrays, turn)
        assert want[0] == 0
        assert len(set(want)) == len(want)
        assert sampled(arrays, turn) == want


@pytest.mark.parametrize("length", [1, 300, 70_000, 150_000, 1_100_000])
def test_every_element_is_looked_at_within_256_turns_and_no_more_often_than_others(length: int):
    """Seen by what changes: a change of an element changes the value of the turns that look at it."""
    values = np.zeros(length, dtype=np.float32)
    stride = int(sample_of(length)[1])
    assert stride <= 256
    still = [sampled([values], turn) for turn in range(stride)]
    for element in {0, length // 3, length // 2, length - 1}:
        values[element] = 1.0
        changed = [turn for turn in range(stride) if sampled([values], turn) != still[turn]]
        assert len(changed) == 1
        values[element] = 0.0


@examples(40)
@given(
    st.integers(1, 400_000),
    st.integers(0, 2**31),
    st.sampled_from(["scattered", "block", "column"]),
    st.data(),
)
def test_a_difference_in_a_hundredth_of_the_elements_is_seen_within_two_turns(length, turn, shape, data):
    """In 99 of 100 cases; here at least, in all but a few of the drawn ones, whatever the shape of the difference."""
    count = -(-length // 100)
    draw = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    seen = 0
    for _ in range(10):
        values = np.zeros(length, dtype=np.float32)
        if shape == "scattered":
            at = draw.choice(length, count, replace=False)
        elif shape == "block":
            at = draw.integers(0, length - count + 1) + np.arange(count)
        else:  # of a matrix with up to 100 columns
            columns = int(draw.integers(1, 101))
            at = np.arange(draw.integers(0, min(columns, length)), length, columns)
        before = [sampled([values], turn + i) for i in (0, 1)]
        values[at] = 1.0
        seen += before != [sampled([values], turn + i) for i in (0, 1)]
    assert seen >= 8


def test_a_gpu_gives_the_same_values():
    with standin.device(order=2) as (place, device):
        arrays, expected = [], []
        for length in (1, 300, 70_000, 200_001):
            values = np.random.default_rng(length).normal(size=length).astype(np.float32)
            there = place.zeros(length)
            there.write(values)
            arrays.append(there)
            expected.append(values)
        table = table_of(expected)
        table["gradient"] = [there.address for there in arrays]
        values = np.full(len(arrays), 7, dtype=np.uint32)
        for turn in (0, 200):
            place.kernels.sample(table, values, turn=turn)
            assert values.tolist() == sampled(expected, turn)
        assert "sample" in device.called
