"""GlobalTopK: k elements of the whole model, wherever they are."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples

from gradcomp import GlobalTopK, LayerSpec
from gradcomp.exchange.layout import build_layout
from gradcomp.kernels.devices import HOST
from gradcomp.testing.recording import payload_of
from gradcomp.testing.simulation import Simulation, plan_for

SIZES = (30, 0, 1, 17, 52)
LAYERS = [LayerSpec(f"layer{i}", (n,)) for i, n in enumerate(SIZES)]
TOTAL = sum(SIZES)


def selected(compressor: GlobalTopK, values: np.ndarray) -> np.ndarray:
    """Which of the model's elements, in the order in which rows travel, one rank sends."""
    ranks = Simulation(LAYERS, compressor, 1, reorder=False)
    rows = ranks.pipelines[0].layout.buckets[0].groups[0].layers.tolist()
    cuts = np.cumsum([SIZES[i] for i in rows])[:-1]
    gradients = dict(zip(rows, np.split(values.astype(np.float32), cuts), strict=True))
    means = ranks.step([[gradients[i] for i in range(len(LAYERS))]]).all_means()
    mean = np.concatenate([means[i] for i in rows])
    sent = mean != 0
    np.testing.assert_array_equal(mean[sent], values[sent].astype(np.float32))
    return sent


def largest(values: np.ndarray, k: int) -> np.ndarray:
    wanted = np.zeros(len(values), bool)
    wanted[np.argsort(-np.abs(values.astype(np.float32)), kind="stable")[:k]] = True
    return wanted


few_values = st.lists(st.sampled_from([1.0, -1.0, 1.5, 3e-39, -2e38, 1e-45]), min_size=TOTAL, max_size=TOTAL)
any_values = st.lists(
    st.floats(width=32, allow_nan=False, allow_infinity=False).filter(bool), min_size=TOTAL, max_size=TOTAL
)


@given(few_values | any_values, st.integers(1, 1024))
@examples(80)
def test_exactly_the_k_largest_are_sent_and_of_equals_the_first(values, share: int):
    values = np.array(values)
    k = max(1, round(share / 1024 * TOTAL))
    sent = selected(GlobalTopK(share / 1024, feedback=False), values)
    np.testing.assert_array_equal(sent, largest(values, k))


@pytest.mark.parametrize(("value", "sent"), [(0.0, 0), (1.0, 10)])
def test_of_equal_elements_no_more_than_k_travel(value: float, sent: int):
    ranks = Simulation(LAYERS, GlobalTopK(0.1, indices="raw"), 2, record=True, reorder=False)
    ranks.step([[np.full(n, value, np.float32) for n in SIZES]] * 2)
    data = ranks.ranks[0].transport.sent[-1][1]
    assert len(payload_of(data)) == 4 * len(LAYERS) + 8 * sent


def test_the_selection_is_found_in_few_passes(monkeypatch):
    """One huge element and very many tiny ones: a bisection of the magnitudes themselves would not end."""
    passes = []
    tail = HOST.kernels.tail
    monkeypatch.setattr(HOST.kernels, "tail", lambda *arguments: (passes.append(1), tail(*arguments)))
    values = np.full(TOTAL, 1e-45)
    values[40] = 3e38
    assert selected(GlobalTopK(0.05, feedback=False), values).sum() == 5
    assert len(passes) <= 33


def test_the_whole_model_is_one_bucket_whatever_the_slices():
    ranks = Simulation(LAYERS, GlobalTopK(0.1), 2, slice_elements=20)
    assert len(ranks.pipelines[0].layout.buckets) == 1


def test_densities_that_differ_add_up():
    plan = plan_for(LAYERS, GlobalTopK(0.1))
    mixed = dataclasses.replace(
        plan, assignments=(*plan.assignments[:4], dataclasses.replace(plan.assignments[4], level=0.5))
    )
    ranks = Simulation(LAYERS, mixed, 1)
    sent = sum(np.count_nonzero(mean) for mean in ranks.step().all_means())
    assert sent == round(0.1 * 48 + 0.5 * 52)


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=6), st.floats(1e-6, 1.0))
@examples(60)
def test_wire_bytes_shares_out_k(sizes, density: float):
    layers = [LayerSpec(f"layer{i}", (n,)) for i, n in enumerate(sizes)]
    compressor = GlobalTopK(density, indices="raw")
    plan = plan_for(layers, compressor)
    group = build_layout(layers, plan, range(len(layers)), frozenset(), 100).buckets[0].groups[0]
    k = min(sum(sizes), max(1, round(density * sum(sizes))))
    assert int(compressor.wire_bytes(group).sum()) in range(
        4 * len(sizes) + 8 * k - 8, 4 * len(sizes) + 8 * k + 9
    )


def test_a_layer_that_is_not_finite_does_not_spoil_the_choice_among_the_others():
    ranks = Simulation(LAYERS, GlobalTopK(0.1), 2)
    gradients = ranks.gradients()
    gradients[0][4][:] = np.nan
    outcome = ranks.step(gradients)
    assert outcome.result.nonfinite.tolist() == [False] * 4 + [True]
    assert np.isfinite(np.concatenate(outcome.all_means()[:4])).all()
    assert outcome.mean(0).any()
