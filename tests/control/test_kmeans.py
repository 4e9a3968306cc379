"""KMeans: clusters like scikit-learn's, levels in the order of norm - size, never over the budget."""

from __future__ import annotations

import numpy as np
import pytest
from control.observed import chosen, environment, seen_by
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples

from gradcomp import ConfigError, Quantize
from gradcomp.control.grouped import KMeans, kmeans
from gradcomp.control.levels import total_bytes, total_error


def inertia(points, labels):
    return sum(((points[labels == j] - points[labels == j].mean(0)) ** 2).sum() for j in set(labels.tolist()))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("k", [2, 6])
def test_clusters_are_as_tight_as_scikit_learns(seed, k):
    cluster = pytest.importorskip("sklearn.cluster", reason="needs scikit-learn")
    points = np.random.default_rng(seed).normal(size=(120, 2))
    labels = kmeans(points, k)
    theirs = cluster.KMeans(k, n_init=10, random_state=seed).fit(points).inertia_
    assert len(set(labels.tolist())) == k
    assert inertia(points, labels) <= 1.05 * theirs


def test_separate_blobs_are_found():
    random = np.random.default_rng(3)
    centres = np.array([[0, 0], [9, 0], [0, 9], [9, 9], [4, 20]])
    truth = np.repeat(np.arange(5), 12)
    labels = kmeans(centres[truth] + 0.3 * random.normal(size=(60, 2)), 5)
    assert len(set(zip(truth.tolist(), labels.tolist(), strict=True))) == 5


@pytest.mark.parametrize("different", [1, 2, 3])
def test_no_more_clusters_than_different_points(different):
    points = np.repeat(np.arange(different, dtype=float)[:, None], 2, axis=1)[[0, -1, 0, different // 2, -1]]
    labels = kmeans(points, 6)
    assert set(labels.tolist()) == set(range(different))
    assert inertia(points, labels) == 0


def test_the_same_points_give_the_same_clusters():
    points = np.random.default_rng(0).normal(size=(50, 2))
    assert kmeans(points, 6).tobytes() == kmeans(points.copy(), 6).tobytes()


def test_large_quiet_layers_are_compressed_most():
    sizes = [64, 64, 6400, 6400, 640, 640]
    observed = seen_by(KMeans(5, levels=[2, 4, 8]), sizes, [9.0, 8.0, 0.1, 0.11, 1.0, 1.1])
    assert chosen(observed, KMeans(5, levels=[2, 4, 8], alpha=None).decide(observed).choices) == [
        8,
        8,
        2,
        2,
        4,
        4,
    ]


@pytest.mark.parametrize(
    ("alpha", "expected"),
    [
        (3.1, [3, 3, 2, 2]),
        (2.1, [4, 4, 3, 2]),  # the one with the least compression goes on: 0.5
        (1.8, [8, 4, 3, 2]),  # errors 2^-8 + 2^-4 + 2^-3 + 2^-2 = 0.44, the reference's are 0.25
        (1.3, [8, 4, 3, 3]),  # the one with the most compression goes back first: 0.32
        (1.1, [8, 4, 4, 3]),  # of two, the more sensitive: 0.25390625
    ],
)
def test_the_budget_is_met_from_both_ends(alpha, expected):
    rule = KMeans(5, levels=[2, 3, 4, 8], alpha=alpha)
    observed = seen_by(rule, [64, 640, 6400, 64000], [1.0] * 4)
    assert chosen(observed, rule.decide(observed).choices) == expected


def test_where_the_reference_is_cheaper_it_is_taken():
    # The large layer is the loud one.
    rule = KMeans(5, levels=[2, 4, 8])
    observed = seen_by(rule, [64, 6400], [1.0, 1e6])
    assert chosen(observed, rule.decide(observed).choices) == [4, 4]


@examples(60)
@given(
    st.lists(st.tuples(st.integers(1, 5000), st.floats(1e-30, 1e30)), min_size=1, max_size=30),
    st.sampled_from([0.3, 0.8, 1.0, 2.0]),
    st.sampled_from([None, [4], [2, 4, 8], [1, 2, 3, 4, 5, 6, 7, 8]]),
)
def test_the_budget_is_kept(layers, alpha, given_levels):
    rule = KMeans(5, levels=given_levels, alpha=alpha)
    observed = seen_by(rule, [n for n, _ in layers], [g for _, g in layers])
    decision = rule.decide(observed)
    reference = observed.candidates.reference
    within = total_error(observed, decision.choices) <= alpha * total_error(observed, reference)
    assert within != bool(decision.memory[0])
    if alpha >= 1:
        assert within
        assert total_bytes(observed, decision.choices) <= total_bytes(observed, reference)


def test_nothing_within_the_budget_warns_once(caplog):
    rule = KMeans(5, levels=[2, 4], alpha=0.5)
    observed = seen_by(rule, [64, 6400], [1.0, 1.0], current=[0, 0])
    decision = rule.decide(observed)
    assert chosen(observed, decision.choices) == [4, 4]
    again = rule.decide(seen_by(rule, [64, 6400], [1.0, 1.0], memory=decision.memory))
    assert chosen(observed, again.choices) == [4, 4]
    assert caplog.text.count("layers use the reference") == 1


def test_silent_layers_keep_their_choice():
    rule = KMeans(5, levels=[2, 4, 8], alpha=None)
    observed = seen_by(rule, [64, 6400, 640], [1.0, 1.0, 0.0], current=[1, 1, 0])
    assert chosen(observed, rule.decide(observed).choices) == [8, 2, 2]
    nothing = seen_by(rule, [64, 6400], [0.0, 0.0], current=[0, 2])
    assert rule.decide(nothing).choices.tolist() == [0, 2]


@pytest.mark.parametrize("sizes", [[64], [64, 64, 64]])
def test_layers_that_are_all_alike_take_the_reference(sizes):
    rule = KMeans(5)
    observed = seen_by(rule, sizes, [1.0] * len(sizes), current=[0] * len(sizes))
    assert chosen(observed, rule.decide(observed).choices) == [4] * len(sizes)


def test_bucket_sizes_are_a_second_level():
    choices = [Quantize(2, 1024), Quantize(4, 512), Quantize(8, 64)]
    rule = KMeans(5, levels=choices, alpha=None)
    observed = seen_by(rule, [6400, 640, 64], [1.0, 1.0, 1.0], own=Quantize(4, 512))
    found = rule.decide(observed).choices
    assert [observed.candidates.choices[row][k] for row, k in enumerate(found)] == choices


def test_fewer_clusters_than_levels_are_spread_over_them():
    rule = KMeans(5, levels=list(range(1, 9)), alpha=None, clusters=2)
    observed = seen_by(rule, [64, 65, 6400, 6401], [1.0, 1.0, 1.0, 1.0])
    assert chosen(observed, rule.decide(observed).choices) == [8, 8, 1, 1]


@pytest.mark.parametrize("world", [1, 3])
def test_a_world_of_one_decides_the_same_way(world):
    rule = KMeans(5, levels=[2, 4, 8], alpha=None)
    observed = seen_by(rule, [64, 640, 6400], [1.0, 1.0, 1.0], world=world)
    assert chosen(observed, rule.decide(observed).choices) == [8, 4, 2]


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"levels": []}, "empty"),
        ({"levels": "248"}, "sequence"),
        ({"levels": 4}, "sequence"),
        ({"levels": [2, True]}, "level"),
        ({"levels": [2, float("inf")]}, "level"),
        ({"levels": ["nothing"]}, "unknown"),
        ({"alpha": 0}, "alpha"),
        ({"alpha": -1}, "alpha"),
        ({"alpha": float("nan")}, "alpha"),
        ({"clusters": 0}, "clusters"),
        ({"clusters": 2.5}, "clusters"),
    ],
)
def test_bad_input(bad, words):
    with pytest.raises(ConfigError, match=words):
        KMeans(5, **bad)


def test_a_reference_outside_the_levels():
    with pytest.raises(ConfigError, match="outside"):
        KMeans(5, levels=[2, 3]).begin(environment([64]))
