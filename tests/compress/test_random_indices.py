"""Indices from the shared seed: where they lie, and what they depend on."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples

from gradcomp.compress.sparse.drawn import INDEX_RANK, random_blocks, random_indices
from gradcomp.kernels.philox import philox4x32, strata
from gradcomp.kernels.segments import MAX_ELEMENTS, OWNER_RANK

row = st.tuples(st.integers(0, 300), st.floats(0, 1), st.integers(0, 2**32 - 1)).map(
    lambda drawn: (drawn[0], int(drawn[1] * drawn[0]), drawn[2])
)
tables = st.lists(row, max_size=6).map(
    lambda rows: (
        np.array([n for n, _, _ in rows], np.int64),
        np.array([k for _, k, _ in rows], np.int64),
        np.array([layer for _, _, layer in rows], np.uint32),
    )
)


@given(tables, st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1))
@examples(60)
def test_one_index_of_every_stratum_is_drawn(table, seed: int, step: int):
    lengths, counts, layers = table
    offsets, indices = random_indices(lengths, counts, layers, seed, step)
    for n, k, offset in zip(lengths.tolist(), counts.tolist(), offsets.tolist(), strict=True):
        for j, index in enumerate(indices[offset : offset + k].tolist()):
            assert j * n // k <= index < (j + 1) * n // k
    assert len(indices) == counts.sum()


@given(tables, st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1))
@examples(60)
def test_a_block_is_consecutive_and_goes_on_at_the_first_element(table, seed: int, step: int):
    lengths, counts, layers = table
    offsets, indices = random_blocks(lengths, counts, layers, seed, step)
    for n, k, offset in zip(lengths.tolist(), counts.tolist(), offsets.tolist(), strict=True):
        block = indices[offset : offset + k].tolist()
        assert block == sorted(set(block))
        assert all(0 <= index < n for index in block)
        ends = [index for index in block if (index + 1) % n not in block]
        assert len(ends) == (0 if k in (0, n) else 1)
    assert len(indices) == counts.sum()


@given(tables, st.integers(0, 2**64 - 1))
@examples(30)
def test_a_rows_indices_do_not_depend_on_the_other_rows(table, seed: int):
    for draw in (random_indices, random_blocks):
        offsets, together = draw(*table, seed, 3)
        for i, offset in enumerate(offsets.tolist()):
            alone = draw(*(column[i : i + 1] for column in table), seed, 3)[1]
            np.testing.assert_array_equal(alone, together[offset : offset + len(alone)])


def test_seed_step_and_layer_decide():
    def draw(seed: int, step: int, layer: int) -> bytes:
        n, k = np.array([10_000]), np.array([50])
        return random_indices(n, k, np.array([layer], np.uint32), seed, step)[1].tobytes()

    drawn = {draw(*place) for place in [(1, 2, 3), (2, 2, 3), (1 + 2**32, 2, 3), (1, 3, 3), (1, 2, 4)]}
    assert len(drawn) == 5
    assert draw(1, 2, 3) in drawn


def test_a_draw_is_a_word_of_the_generator():
    n, k, layer, seed, step = 1000, 7, 0xDEADBEEF, 5 + (9 << 32), 11
    indices = random_indices(np.array([n]), np.array([k]), np.array([layer], np.uint32), seed, step)[1]
    counter = np.array([[block, layer, step, INDEX_RANK] for block in range(2)], np.uint32)
    words = philox4x32(counter, (5, 9)).reshape(-1)
    first, sizes = (strata(np.array([n]), np.array([k]))[i].tolist() for i in range(2))
    want = [f + (int(w) * s >> 32) for f, w, s in zip(first, words, sizes, strict=False)]
    assert indices.tolist() == want


def test_no_rank_and_no_owner_draws_the_same_words():
    assert INDEX_RANK not in (OWNER_RANK, *range(1 << 16))


def test_every_element_of_a_stratum_is_drawn_as_often():
    lengths, counts = np.array([10]), np.array([3])
    drawn = np.zeros(10)
    for step in range(6000):
        drawn[random_indices(lengths, counts, np.array([1], np.uint32), 0, step)[1]] += 1
    share = 1 / np.repeat([3, 3, 4], [3, 3, 4])
    assert (np.abs(drawn / 6000 - share) < 5 * np.sqrt(share * (1 - share) / 6000)).all()


def test_every_element_is_in_a_block_as_often():
    lengths, counts = np.array([10]), np.array([3])
    drawn = np.zeros(10)
    for step in range(6000):
        drawn[random_blocks(lengths, counts, np.array([1], np.uint32), 0, step)[1]] += 1
    assert (np.abs(drawn / 6000 - 0.3) < 5 * np.sqrt(0.3 * 0.7 / 6000)).all()


def test_the_largest_layers_are_drawn_from_to_their_end():
    n = 2**32 - 1
    assert n < MAX_ELEMENTS
    lengths, ones = np.full(4000, n), np.full(4000, 1)
    indices = random_indices(lengths, ones, np.arange(4000, dtype=np.uint32), 3, 0)[1].astype(np.float64)
    assert indices.max() > 0.99 * n
    assert abs(indices.mean() / n - 0.5) < 5 * np.sqrt(1 / 12 / 4000)
    first, sizes = strata(np.array([n]), np.array([100_000]))
    assert int(first[-1] + sizes[-1]) == n
    assert sizes.min() >= n // 100_000
