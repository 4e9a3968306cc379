"""The random numbers: Random123's vectors, no trace of the layout, and the same indices from every backend."""

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


# --- Philox -----------------------------------------------------------------------------------------------

KNOWN_ANSWERS = [
    # counter, key, words
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words_of(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN_ANSWERS)
def test_known_answers(counter: str, key: str, words: str) -> None:
    key0, key1 = words_of(key)
    drawn = philox.philox4x32(np.array(words_of(counter), np.uint32), (key0, key1))
    assert drawn.tolist() == words_of(words)


def test_lanes_of_a_counter() -> None:
    # Known answer 3, as the draws of the eight elements that share its counter.
    draws = philox.uniform(
        0x243F6A88 * 8, 8, seed=0x299F31D0A4093822, layer=0x85A308D3, step=0x13198A2E, rank=0x03707344
    )
    halves = [0xFE09, 0xD16C, 0xCCEB, 0x94FD, 0xE420, 0x5001, 0x6EA1, 0x2412]
    assert (draws * 65536 - philox.offset(0x13198A2E)).tolist() == halves


def test_offsets_are_spread_evenly_over_the_steps() -> None:
    for stride in (1, 2, 3):
        for first in (0, 1000):
            offsets = [philox.offset(first + stride * i) for i in range(256)]
            assert abs(np.mean(offsets) - 0.5) < 0.01
            assert max(np.diff(np.sort(offsets))) < 0.02
    assert 0 < min(offsets) < max(offsets) < 1


def test_draws_lie_inside_the_unit_interval() -> None:
    # The outermost lanes at the outermost offsets, in float32 as it is.
    offsets = [philox.offset(step) for step in range(1024)]
    for lane, extreme in ((0, min(offsets)), (65535, max(offsets))):
        u = (np.float32(lane) + np.float32(extreme)) * np.float32(2.0**-16)
        assert np.float64(u) == (lane + extreme) / 65536
        assert 0 < u < 1


def test_draws_depend_on_the_element_not_on_the_segment() -> None:
    coordinates = {"seed": 1, "layer": 2, "step": 3, "rank": 4}
    whole = philox.uniform(0, 100, **coordinates)
    for start, length in [(0, 1), (5, 20), (8, 8), (99, 1), (7, 0)]:
        np.testing.assert_array_equal(
            philox.uniform(start, length, **coordinates), whole[start : start + length]
        )


@pytest.mark.parametrize("coordinate", ["seed", "layer", "step", "rank"])
def test_streams_differ(coordinate: str) -> None:
    coordinates = {"seed": 1, "layer": 2, "step": 3, "rank": 4}
    draws = philox.uniform(0, 64, **coordinates)
    others = philox.uniform(0, 64, **(coordinates | {coordinate: 9}))
    assert (draws != others).mean() > 0.9
