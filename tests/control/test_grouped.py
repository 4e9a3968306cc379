"""Linear, KMeans and Bayes: levels in the order of their rule, never over the budget."""

from __future__ import annotations

import importlib.util
import logging

import numpy as np
import pytest
from control.observed import chosen, seen_by
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples

from gradcomp import ConfigError, PowerSGD, Quantize
from gradcomp.control.grouped import Bayes, KMeans, Linear, kmeans

needs_optuna = pytest.mark.skipif(
    importlib.util.find_spec("optuna") is None, reason="needs Optuna: pip install 'gradcomp[bayes]'"
)


def taken(rule, sizes, norms, **about) -> list:
    """The levels that a rule decides on."""
    observed = seen_by(rule, sizes, norms, **about)
    return chosen(observed, rule.decide(observed).choices)


def two_four_eight(rule=Linear, **options):
    return rule(5, levels=[2, 4, 8], alpha=None, **options)


# --- Linear -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("levels", "sizes", "norms", "expected"),
    [
        ([2, 3, 4, 5, 6], [64, 640, 64, 6400, 64], [3.0, 1.0, 2.0, 1.0, 9.0], [5, 3, 4, 2, 6]),
        ([2, 4, 8], [64] * 7, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], [2, 2, 4, 4, 4, 8, 8]),  # interpolated
        ([2, 4, 8], [64] * 3, [1.0] * 3, [2, 4, 8]),  # equal layers keep their order
        ([2, 4, 8], [64], [1.0], [4]),  # one layer takes the reference
        ([4], [64] * 3, [1.0, 2.0, 3.0], [4, 4, 4]),
        ([2, 4, 8], [64] * 3, [1e300, 1e-300, 1.0], [8, 2, 4]),
    ],
)
def test_levels_follow_the_order_of_norm_by_size(levels, sizes, norms, expected):
    assert taken(Linear(5, levels=levels, alpha=None), sizes, norms, current=[0] * len(sizes)) == expected


def test_more_levels_than_layers_are_skipped():
    least, middle, most = taken(Linear(5, levels=list(range(1, 9)), alpha=None), [64] * 3, [1.0, 2.0, 3.0])
    assert (least, most) == (1, 8)
    assert middle in (4, 5)


def test_errors_are_measured_only_for_a_budget():
    assert Linear(5).alpha == 1.0
    assert Linear(5).needs_errors
    assert not Linear(5, alpha=None).needs_errors


def test_linear_without_a_budget_may_lose_more():
    observed = seen_by(Linear(5, levels=[2, 4, 8]), [64] * 6, np.linspace(1.0, 1.5, 6))
    without = Linear(5, levels=[2, 4, 8], alpha=None).decide(observed)
    assert observed.total_error(without.choices) > observed.total_error(observed.candidates.reference)


@pytest.mark.parametrize("alpha", [0.6, 1.0, 1.7, 100.0])
def test_layers_with_fewer_choices_take_part(alpha):
    # A matrix of 8 by 8 is sent as it is at rank 4 already: one choice.
    rule = Linear(5, levels=[2, 4, 8, 16], alpha=alpha)
    observed = seen_by(rule, [64, 640, 6400, 64], [1.0, 2.0, 3.0, 0.1], own=PowerSGD(4))
    assert [len(choices) for choices in observed.candidates.choices] == [2, 3, 3, 2]
    decision, reference = rule.decide(observed), observed.candidates.reference
    assert not decision.memory[0]
    assert observed.total_error(decision.choices) <= alpha * observed.total_error(reference)


# --- KMeans -------------------------------------------------------------------------------------------------


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
    points = centres[truth] + 0.3 * random.normal(size=(60, 2))
    labels = kmeans(points, 5)
    assert len(set(zip(truth.tolist(), labels.tolist(), strict=True))) == 5
    assert labels.tobytes() == kmeans(points.copy(), 5).tobytes()


@pytest.mark.parametrize("different", [1, 2, 3])
def test_no_more_clusters_than_different_points(different):
    points = np.repeat(np.arange(different, dtype=float)[:, None], 2, axis=1)[[0, -1, 0, different // 2, -1]]
    labels = kmeans(points, 6)
    assert set(labels.tolist()) == set(range(different))
    assert inertia(points, labels) == 0


def test_large_quiet_layers_are_compressed_most():
    norms = [9.0, 8.0, 0.1, 0.11, 1.0, 1.1]
    assert taken(two_four_eight(KMeans), [64, 64, 6400, 6400, 640, 640], norms) == [8, 8, 2, 2, 4, 4]


def test_plain_points_are_clustered_by_size():
    norms = [0.1, 9.0, 9.0, 0.11, 1.0, 1.1]
    rule = KMeans(5, levels=[2, 4, 8], alpha=None, points="plain")
    assert taken(rule, [64, 64, 6400, 6400, 640, 640], norms) == [8, 8, 2, 2, 4, 4]
    with pytest.raises(ConfigError, match="points must be one of log, plain"):
        KMeans(5, points="raw")


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
    assert taken(KMeans(5, levels=[2, 3, 4, 8], alpha=alpha), [64, 640, 6400, 64000], [1.0] * 4) == expected


def test_where_the_reference_is_cheaper_it_is_taken():
    # The large layer is the loud one.
    assert taken(KMeans(5, levels=[2, 4, 8]), [64, 6400], [1.0, 1e6]) == [4, 4]


@pytest.mark.parametrize("sizes", [[64], [64, 64, 64]])
def test_layers_that_are_all_alike_take_the_reference(sizes):
    assert taken(KMeans(5), sizes, [1.0] * len(sizes), current=[0] * len(sizes)) == [4] * len(sizes)


def test_bucket_sizes_are_a_second_level():
    choices = [Quantize(2, 1024), Quantize(4, 512), Quantize(8, 64)]
    rule = KMeans(5, levels=choices, alpha=None)
    observed = seen_by(rule, [6400, 640, 64], [1.0, 1.0, 1.0], own=Quantize(4, 512))
    found = rule.decide(observed).choices
    assert [observed.candidates.choices[row][k] for row, k in enumerate(found)] == choices


def test_fewer_clusters_than_levels_are_spread_over_them():
    rule = KMeans(5, levels=list(range(1, 9)), alpha=None, clusters=2)
    assert taken(rule, [64, 65, 6400, 6401], [1.0] * 4) == [8, 8, 1, 1]


@pytest.mark.parametrize("world", [1, 3])
def test_a_world_of_one_decides_the_same_way(world):
    assert taken(two_four_eight(KMeans), [64, 640, 6400], [1.0] * 3, world=world) == [8, 4, 2]


# --- Bayes --------------------------------------------------------------------------------------------------


def some(rule: Bayes, layers: int = 8, seed: int = 0, **about):
    random = np.random.default_rng(seed)
    sizes = [int(size) for size in np.exp(random.uniform(4, 10, layers))]
    return seen_by(rule, sizes, np.exp(random.uniform(-3, 3, layers)), **about)


@needs_optuna
@pytest.mark.parametrize("layers", [4, 40])
def test_fewer_bytes_within_the_error(layers):
    rule = Bayes(5, trials=100)
    observed = some(rule, layers)
    found, reference = rule.decide(observed).choices, observed.candidates.reference
    assert observed.total_error(found) <= observed.total_error(reference)
    assert observed.total_bytes(found) < 0.99 * observed.total_bytes(reference)


@needs_optuna
def test_the_same_seed_finds_the_same():
    rule = Bayes(5, trials=30, seed=7)
    observed = some(rule)
    first, again, other = (
        one.decide(observed).choices.tolist() for one in (rule, rule, Bayes(5, trials=30, seed=8))
    )
    assert first == again != other


@needs_optuna
def test_it_is_never_worse_than_the_plan_in_force():
    rule = Bayes(5, trials=1)
    observed = some(rule, current=Bayes(5, trials=100).decide(some(rule)).choices)
    before = observed.total_bytes(observed.current)
    assert observed.total_bytes(rule.decide(observed).choices) <= before
    assert before < observed.total_bytes(observed.candidates.reference)


@needs_optuna
@pytest.mark.parametrize("levels", [[4], None])
def test_silent_layers_and_layers_without_choice(levels):
    rule = Bayes(5, levels=levels, trials=4)
    for norms in ([0.0, 0.0], [1.0, 0.0]):
        choices = rule.decide(seen_by(rule, [64, 640], norms, current=[0, 0])).choices
        assert choices[1] == 0
        assert norms[0] or choices[0] == 0


@needs_optuna
def test_errors_of_zero_leave_nothing_to_weigh():
    rule = Bayes(5, levels=[2, 4], trials=8)
    assert taken(rule, [64, 640], [1.0, 1.0], errors=np.zeros((2, 2))) == [2, 2]


@needs_optuna
def test_optuna_is_quiet_and_keeps_its_verbosity(capfd):
    import optuna

    optuna.logging.set_verbosity(optuna.logging.INFO)
    rule = Bayes(5, trials=2)
    rule.decide(some(rule))
    assert optuna.logging.get_verbosity() == logging.INFO
    assert "study" not in capfd.readouterr().err


def test_without_optuna_the_error_names_the_extra(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"gradcomp\[bayes\]"):
        Bayes(5)


# --- all of them --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [KMeans, Linear])
@examples(60)
@given(
    st.lists(st.tuples(st.integers(1, 5000), st.floats(1e-30, 1e30)), min_size=1, max_size=30),
    st.sampled_from([0.3, 0.8, 1.0, 2.0]),
    st.sampled_from([None, [4], [2, 4, 8], [1, 2, 3, 4, 5, 6, 7, 8]]),
)
def test_the_budget_is_kept(rule, layers, alpha, given_levels):
    controller = rule(5, levels=given_levels, alpha=alpha)
    observed = seen_by(controller, [n for n, _ in layers], [g for _, g in layers])
    decision = controller.decide(observed)
    reference = observed.candidates.reference
    within = observed.total_error(decision.choices) <= alpha * observed.total_error(reference)
    assert within != bool(decision.memory[0])
    if alpha >= 1:
        assert within
        assert observed.total_bytes(decision.choices) <= observed.total_bytes(reference)


@pytest.mark.parametrize(
    "rule", [Linear, KMeans, pytest.param(lambda *a, **k: Bayes(*a, trials=4, **k), marks=needs_optuna)]
)
def test_nothing_within_the_budget_warns_once_and_takes_the_reference(rule, caplog):
    controller, memory = rule(5, levels=[2, 4], alpha=0.5), None
    for current in ([0, 0], None):
        observed = seen_by(controller, [64, 6400], [1.0, 2.0], current=current, memory=memory)
        decision = controller.decide(observed)
        memory = decision.memory
        assert chosen(observed, decision.choices) == [4, 4]
        assert memory.tolist() == [1.0]
    assert caplog.text.count(f"{controller.name}: no choice of levels has at most 0.5 times") == 1
    assert caplog.text.count("layers use the reference") == 1


@pytest.mark.parametrize(
    ("rule", "expected"), [(two_four_eight(), [8, 2, 8, 2]), (two_four_eight(KMeans), [8, 2, 8, 2])]
)
def test_silent_layers_do_not_count_and_keep_their_choice(rule, expected):
    assert taken(rule, [64, 6400], [0.0, 0.0], current=[0, 2]) == [2, 8]
    found = taken(rule, [64, 6400, 640, 64], [2.0, 1.0, 0.0, 0.0], current=[1, 1, 2, 0])
    assert found == expected
