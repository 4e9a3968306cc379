"""Tests RandomK and RandomBlock: the indices that they draw from the shared seed, what is sent, and what is kept."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples

from gradcomp import LayerSpec, RandomBlock, RandomK
from gradcomp.compress.sparse.drawn import INDEX_RANK, random_blocks, random_indices
from gradcomp.kernels.philox import philox4x32, strata
from gradcomp.kernels.segments import MAX_ELEMENTS, OWNER_RANK
from gradcomp.testing.simulation import Simulation, true_mean

LAYERS = [LayerSpec("a", (100,)), LayerSpec("empty", (0,)), LayerSpec("b", (7, 9))]
random_kinds = pytest.mark.parametrize("kind", [RandomK, RandomBlock])

row = st.tuples(st.integers(0, 300), st.floats(0, 1), st.integers(0, 2**32 - 1)).map(
    lambda drawn: (drawn[0], int(drawn[1] * drawn[0]), drawn[2])
)
tables = st.lists(row, max_size=6).map(
    lambda rows: [
        np.array([each[i] for each in rows], kind) for i, kind in enumerate((np.int64, np.int64, np.uint32))
    ]
)


# --- indices ------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("draw", [random_indices, random_blocks])
def test_seed_step_and_layer_decide(draw):
    places = [(1, 2, 3), (2, 2, 3), (1 + 2**32, 2, 3), (1, 3, 3), (1, 2, 4), (1, 2, 3)]
    size = np.array([10_000]), np.array([50])
    drawn = [
        draw(*size, np.array([layer], np.uint32), seed, step)[1].tobytes() for seed, step, layer in places
    ]
    assert len(set(drawn)) == 5
    assert drawn[0] == drawn[-1]


def test_a_draw_is_a_word_of_the_generator_that_no_rank_and_no_owner_draws():
    n, k, layer, seed, step = 1000, 7, 0xDEADBEEF, 5 + (9 << 32), 11
    indices = random_indices(np.array([n]), np.array([k]), np.array([layer], np.uint32), seed, step)[1]
    counter = np.array([[block, layer, step, INDEX_RANK] for block in range(2)], np.uint32)
    words = philox4x32(counter, (5, 9)).reshape(-1)
    first, sizes = (strata(np.array([n]), np.array([k]))[i].tolist() for i in range(2))
    assert indices.tolist() == [f + (int(w) * s >> 32) for f, w, s in zip(first, words, sizes, strict=False)]
    assert INDEX_RANK not in (OWNER_RANK, *range(1 << 16))


@pytest.mark.parametrize(
    ("draw", "share"),
    [(random_indices, 1 / np.repeat([3, 3, 4], [3, 3, 4])), (random_blocks, np.full(10, 0.3))],
)
def test_every_element_of_a_stratum_and_of_a_layer_is_drawn_as_often(draw, share: np.ndarray):
    drawn = np.zeros(10)
    for step in range(6000):
        drawn[draw(np.array([10]), np.array([3]), np.array([1], np.uint32), 0, step)[1]] += 1
    assert (np.abs(drawn / 6000 - share) < 5 * np.sqrt(share * (1 - share) / 6000)).all()


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


# --- what is sent, and what stays ---------------------------------------------------------------------------


@random_kinds
@pytest.mark.parametrize("density", [1e-9, 0.05, 0.33, 1.0])
def test_the_true_mean_comes_back_at_k_elements_and_nothing_elsewhere(kind, density: float):
    ranks = Simulation(LAYERS, kind(density), 3)
    gradients = ranks.gradients()
    means = ranks.step(gradients).all_means()
    for layer, spec in enumerate(LAYERS):
        sent = np.flatnonzero(means[layer])
        assert len(sent) == (max(1, round(density * spec.size)) if spec.size else 0)
        np.testing.assert_allclose(
            means[layer][sent], true_mean(gradients, layer)[sent], rtol=1e-5, atol=1e-7
        )
        for rank, pipeline in enumerate(ranks.pipelines):
            kept = pipeline.residuals.first.value(layer)
            np.testing.assert_array_equal(kept, np.where(means[layer] != 0, 0, gradients[rank][layer]))


@pytest.mark.parametrize(
    ("compressor", "factors"),
    [
        (RandomK(0.07, scaled=True), strata(np.array([100]), np.array([7]))[1]),
        (RandomBlock(0.08, scaled=True), 12.5),
    ],
)
def test_scaled_values_are_divided_by_their_probability(compressor, factors):
    ranks = Simulation([LAYERS[0]], compressor, 2)
    gradients = ranks.gradients()
    mean = ranks.step(gradients).mean(0)
    sent = np.flatnonzero(mean)
    np.testing.assert_allclose(mean[sent], factors * true_mean(gradients, 0)[sent], rtol=1e-5)
    assert ranks.pipelines[0].residuals.nbytes == 0


@random_kinds
def test_a_summand_of_a_layer_that_is_not_finite_is_nan(kind):
    ranks = Simulation([LAYERS[0]], kind(0.05), 2, record=True)
    gradients = ranks.gradients()
    gradients[1][0][:] = np.inf
    gradients[1][0][0] = 1.0
    ranks.step(gradients)
    summands = [np.frombuffer(rank.transport.sent[0][1], np.float32)[:5] for rank in ranks.ranks]
    assert np.isfinite(summands[0]).all()
    assert np.isnan(summands[1]).all()
