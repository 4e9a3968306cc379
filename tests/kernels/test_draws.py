"""Random indices: the same from every backend, and nothing written for numbers that are out of range."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernels.isas import NATIVE, available_isas, instruction_set
from kernels.standin import ORDERS, cuda_backend
from tiers import examples

from gradcomp.kernels import philox

native = NATIVE
CUDA = [cuda_backend(order) for order in ORDERS.values()]
BACKEND = pytest.mark.parametrize("backend", [philox, native, *CUDA], ids=["reference", "native", *ORDERS])
LARGEST = philox.MAX_DRAWN_FROM
GUARD = 0xDEADBEEF

rows = st.tuples(
    st.integers(0, 5000) | st.integers(LARGEST - 5000, LARGEST), st.floats(0, 1), st.integers(0, 2**32 - 1)
).map(lambda row: (row[0], int(row[1] * min(row[0], 5000)), row[2]))


def draw(backend: Any, table: list[tuple[int, int, int]], seed: int, step: int, rank: int) -> np.ndarray:
    """The whole array: rows in reverse order, with gaps between them that nobody may touch."""
    lengths, counts, layers = (np.array([row[i] for row in table], np.int64) for i in range(3))
    offsets = np.cumsum((counts + 3)[::-1])[::-1] - counts
    indices = np.full(int((counts + 3).sum()) + 3, GUARD, np.uint32)
    backend.draw_indices(
        lengths, counts, layers.astype(np.uint32), offsets, indices, seed=seed, step=step, rank=rank
    )
    return indices


@pytest.mark.parametrize("isa", available_isas())
@given(
    st.lists(rows, max_size=5),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**32 - 1),
)
@examples(60)
def test_backends_draw_the_same(isa: str, table, seed: int, step: int, rank: int):
    with instruction_set(isa):
        got = draw(native, table, seed, step, rank)
    np.testing.assert_array_equal(got, draw(philox, table, seed, step, rank))
    assert np.count_nonzero(got == GUARD) >= 3 * len(table) + 3


@pytest.mark.parametrize(
    "backend", [cuda_backend(0), cuda_backend(1), *CUDA], ids=["ascending", "descending", *ORDERS]
)
@given(st.lists(rows, max_size=5), st.integers(0, 2**64 - 1))
@examples(40)
def test_a_gpu_draws_the_same(backend: Any, table, seed: int):
    expected = draw(philox, table, seed, 2**32 - 1, 3)
    np.testing.assert_array_equal(draw(backend, table, seed, 2**32 - 1, 3), expected)


@pytest.mark.parametrize("count", [1, 4, 1023, 1024, 1025, 4096, 100_000])
@pytest.mark.parametrize("length", [100_000, LARGEST])
@pytest.mark.parametrize("backend", [native, cuda_backend(), *CUDA], ids=["native", "ascending", *ORDERS])
def test_long_rows_are_drawn_the_same(backend: Any, length: int, count: int):
    table = [(length, count, 77)]
    expected = draw(philox, table, 5, 6, 7)
    np.testing.assert_array_equal(draw(backend, table, 5, 6, 7), expected)


def arguments(**changes: Any) -> tuple[dict[str, Any], dict[str, int]]:
    arrays: dict[str, Any] = {
        "lengths": np.array([9, 20]),
        "counts": np.array([3, 5]),
        "layers": np.array([1, 2], np.uint32),
        "offsets": np.array([0, 3]),
        "indices": np.full(8, GUARD, np.uint32),
    }
    return arrays | changes, {"seed": 1, "step": 2, "rank": 3}


@BACKEND
@pytest.mark.parametrize(
    ("name", "items", "complaint"),
    [
        ("lengths", [9, -1], "row 1: length"),
        ("lengths", [LARGEST + 1, 20], "row 0: length"),
        ("lengths", [2, 20], "row 0: count"),
        ("counts", [3, -1], "row 1: count"),
        ("counts", [3, 2**62], "row 1: count"),
        ("offsets", [0, 4], "row 1: the indices"),
        ("offsets", [-1, 3], "row 0: the indices"),
        ("offsets", [0, 2**63 - 1], "row 1: the indices"),
        ("counts", [3], "counts has 1"),
        ("offsets", [0, 3, 8], "offsets has 3"),
    ],
)
def test_numbers_out_of_range_are_refused_before_anything_is_written(
    backend, name: str, items, complaint: str
):
    arrays, coordinates = arguments(**{name: np.array(items)})
    with pytest.raises(ValueError, match=complaint):
        backend.draw_indices(*arrays.values(), **coordinates)
    assert (arrays["indices"] == GUARD).all()


@BACKEND
@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("lengths", np.array([9, 20], np.int32)),
        ("layers", np.array([1, 2])),
        ("indices", np.zeros(8, np.int32)),
        ("indices", np.zeros(16, np.uint32)[::2]),
        ("counts", [3, 5]),
    ],
)
def test_arrays_of_another_kind_are_refused(backend, name: str, array):
    arrays, coordinates = arguments(**{name: array})
    with pytest.raises(TypeError):
        backend.draw_indices(*arrays.values(), **coordinates)


@BACKEND
def test_an_array_that_may_not_be_written_is_refused(backend):
    indices = np.full(8, GUARD, np.uint32)
    indices.flags.writeable = False
    arrays, coordinates = arguments(indices=indices)
    with pytest.raises(TypeError):
        backend.draw_indices(*arrays.values(), **coordinates)
