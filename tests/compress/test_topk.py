"""Tests TopK and GlobalTopK: k elements of each layer, or of the model, unless fewer are not zero."""

from __future__ import annotations

import dataclasses
import struct

import numpy as np
import pytest
from compress.selecting import largest, samples, select
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples

import gradcomp as gc
from gradcomp.exchange.layout import build_layout
from gradcomp.kernels.devices import HOST
from gradcomp.reduce.header import ByteHeader
from gradcomp.testing.recording import payload_of
from gradcomp.testing.simulation import Simulation, plan_for, same_bytes, true_mean


def layers_of(*sizes: int) -> list[gc.LayerSpec]:
    return [gc.LayerSpec(f"layer{i}", (n,)) for i, n in enumerate(sizes)]


LAYERS = layers_of(4000, 0, 1, 600, 70)
STEPS = 4
every_world = pytest.mark.parametrize("world", [1, 2, 3, 4])


def gradients(step: int, world: int) -> list[list[np.ndarray]]:
    """Returns gradients of an embedding with few rows, of empty and small layers, and of one that a single rank has."""
    rng = np.random.default_rng(step)

    def of(rank: int) -> list[np.ndarray]:
        embedding = rng.standard_normal((200, 20)) * (rng.random((200, 1)) < 0.04)
        few = np.round(0.5 * rng.standard_normal(600))
        last = rng.standard_normal(70) * (rank == step % world)
        rows = [embedding.reshape(-1), np.zeros(0), np.full(1, float(step % 2)), few, last]
        return [row.astype(np.float32) for row in rows]

    return [of(rank) for rank in range(world)]


@every_world
@pytest.mark.parametrize(
    ("density", "values"), [(0.1, "float32"), (0.5, "float32"), (1.0, "float32"), (0.1, "bfloat16")]
)
def test_the_mean_and_the_residuals_are_those_with_zeros(world: int, density: float, values: str):
    with_zeros, without = (
        Simulation(LAYERS, gc.TopK(density, values=gc.Cast(values), zeros=zeros), world)
        for zeros in (True, False)
    )
    for step in range(STEPS):
        given = gradients(step, world)
        want, got = (ranks.step(given).all_means() for ranks in (with_zeros, without))
        assert all(map(same_bytes, got, want))
        for layer in range(len(LAYERS)):
            assert with_zeros.owed(layer).tobytes() == without.owed(layer).tobytes()


@every_world
@pytest.mark.parametrize(
    "compressor",
    [
        gc.TopK(0.4),
        gc.DGC(0.4, momentum_factor=0.0),
        gc.RedSync(0.4),
        gc.TwoLevelSelection(gc.TopK(0.6), 0.4),
    ],
    ids=gc.Compressor.to_string,
)
def test_feedback_telescopes_over_layers_of_zeros(compressor: gc.Compressor, world: int):
    ranks = Simulation(LAYERS, compressor, world)
    missing = [np.zeros(layer.size) for layer in LAYERS]
    for step in range(STEPS):
        given = gradients(step, world)
        for layer, mean in enumerate(ranks.step(given).all_means()):
            missing[layer] += true_mean(given, layer) - mean
            np.testing.assert_allclose(missing[layer], ranks.owed(layer), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "compressor",
    [gc.TopK(0.4, indices="raw"), gc.DGC(0.4, momentum_factor=0.0), gc.TwoLevelSelection(gc.TopK(0.6), 0.4)],
    ids=gc.Compressor.to_string,
)
def test_what_travels_is_k_elements_or_all_that_are_not_zero(compressor: gc.Compressor):
    ranks = Simulation(LAYERS, compressor, 2, record=True, reorder=False)
    given = gradients(1, 2)
    ranks.step(given)
    (bucket,) = ranks.pipelines[0].layout.buckets
    in_order = np.argsort(bucket.groups[0].layers)
    for rank, own in zip(ranks.ranks, given, strict=True):
        counts = payload_of(rank.transport.sent[-1][1])[: 4 * len(LAYERS)].view("<u4")[in_order].tolist()
        assert counts == [min(round(0.4 * len(g)) or len(g), np.count_nonzero(g)) for g in own]
        assert counts[0] < 0.1 * 4000  # what a layer of rows that occur is for


def test_with_zeros_there_is_no_round_of_sizes_and_no_count():
    ranks = Simulation(LAYERS, gc.TopK(0.1, zeros=True, indices="raw"), 2, record=True, reorder=False)
    ranks.step(gradients(0, 2))
    k = 400 + 0 + 1 + 60 + 7
    for rank in ranks.ranks:
        (message,) = [data for _, data in rank.transport.sent]
        assert len(payload_of(message)) == 8 * k


@pytest.mark.parametrize("count", [41, 2**32 - 1, 4000])
def test_a_count_above_k_is_refused(count: int):
    def tamper(source: int, destination: int, message: np.ndarray) -> np.ndarray:
        if (source, destination) == (1, 0) and len(message) > ByteHeader.size(1) + 16:
            struct.pack_into("<I", message, ByteHeader.size(1), count)
        return message

    ranks = Simulation(layers_of(400), gc.TopK(0.1), 2, tamper=tamper, reorder=False)
    error = ranks.attempt()[0]
    assert isinstance(error, gc.WireFormatError)
    assert f"{count} elements, at most 40 are possible" in str(error)


# --- GlobalTopK ---------------------------------------------------------------------------------------------

MODEL = layers_of(30, 0, 1, 17, 52)
TOTAL = 100


def selected(compressor: gc.GlobalTopK, values: np.ndarray) -> np.ndarray:
    """Returns the indices that one rank sends, in the order of the model's rows in the payload."""
    ranks = Simulation(MODEL, compressor, 1, reorder=False)
    rows = ranks.pipelines[0].layout.buckets[0].groups[0].layers.tolist()
    cuts = np.cumsum([MODEL[i].size for i in rows])[:-1]
    gradients = dict(zip(rows, np.split(values, cuts), strict=True))
    means = ranks.step([[gradients[i] for i in range(len(MODEL))]]).all_means()
    mean = np.concatenate([means[i] for i in rows])
    sent = np.flatnonzero(mean)
    np.testing.assert_array_equal(mean[sent], values[sent])
    return sent


few_values = st.lists(st.sampled_from([1.0, -1.0, 1.5, 3e-39, -2e38, 1e-45]), min_size=TOTAL, max_size=TOTAL)
any_values = st.lists(
    st.floats(width=32, allow_nan=False, allow_infinity=False).filter(bool), min_size=TOTAL, max_size=TOTAL
)


@given(few_values | any_values, st.integers(1, 1024))
@examples(80)
def test_exactly_the_k_largest_are_sent_and_of_equals_the_first(values, share: int):
    given = np.array(values, np.float32)
    sent = selected(gc.GlobalTopK(share / 1024, feedback=False), given)
    np.testing.assert_array_equal(sent, largest(given, max(1, round(share / 1024 * TOTAL))))


@pytest.mark.parametrize(("value", "sent"), [(0.0, 0), (1.0, 10)])
def test_of_equal_elements_no_more_than_k_travel(value: float, sent: int):
    ranks = Simulation(MODEL, gc.GlobalTopK(0.1, indices="raw"), 2, record=True, reorder=False)
    ranks.step([[np.full(layer.size, value, np.float32) for layer in MODEL]] * 2)
    data = ranks.ranks[0].transport.sent[-1][1]
    assert len(payload_of(data)) == 4 * len(MODEL) + 8 * sent


def test_the_selection_is_found_in_few_passes(monkeypatch):
    """With one huge element and many tiny ones, a bisection of the magnitudes themselves would not end."""
    passes = []
    tail = HOST.kernels.tail
    monkeypatch.setattr(HOST.kernels, "tail", lambda *arguments: (passes.append(1), tail(*arguments)))
    values = np.full(TOTAL, 1e-45, np.float32)
    values[40] = 3e38
    assert len(selected(gc.GlobalTopK(0.05, feedback=False), values)) == 5
    assert 0 < len(passes) <= 33


def test_the_whole_model_is_one_bucket_whatever_the_slices():
    ranks = Simulation(MODEL, gc.GlobalTopK(0.1), 2, slice_elements=20)
    assert len(ranks.pipelines[0].layout.buckets) == 1


def test_densities_that_differ_add_up():
    plan = plan_for(MODEL, gc.GlobalTopK(0.1))
    mixed = dataclasses.replace(
        plan, assignments=(*plan.assignments[:4], dataclasses.replace(plan.assignments[4], level=0.5))
    )
    ranks = Simulation(MODEL, mixed, 1)
    sent = sum(np.count_nonzero(mean) for mean in ranks.step().all_means())
    assert sent == round(0.1 * 48 + 0.5 * 52)


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=6), st.floats(1e-6, 1.0))
@examples(60)
def test_wire_bytes_shares_out_k(sizes, density: float):
    layers, compressor = layers_of(*sizes), gc.GlobalTopK(density, indices="raw")
    plan = plan_for(layers, compressor)
    group = build_layout(layers, plan, range(len(layers)), frozenset(), 100).buckets[0].groups[0]
    k = min(sum(sizes), max(1, round(density * sum(sizes))))
    assert abs(int(compressor.wire_bytes(group).sum()) - (4 * len(sizes) + 8 * k)) <= 8


def test_a_layer_that_is_not_finite_does_not_spoil_the_choice_among_the_others():
    ranks = Simulation(MODEL, gc.GlobalTopK(0.1), 2)
    gradients = ranks.gradients()
    gradients[0][4][:] = np.nan
    outcome = ranks.step(gradients)
    assert outcome.result.nonfinite.tolist() == [False] * 4 + [True]
    assert np.isfinite(np.concatenate(outcome.all_means()[:4])).all()
    assert outcome.mean(0).any()


@pytest.mark.parametrize("zeros", [True, False])
@pytest.mark.parametrize("chunk", [1, 7, 64, 5000])
def test_every_chunk_sends_its_share(chunk: int, zeros: bool):
    """Also where a chunk has fewer elements that are not 0, and where one is not finite."""
    layers = [layer[:1003] for layer in samples(1003).values()] + [
        np.zeros(0, np.float32),
        np.ones(1, np.float32),
    ]
    broken = np.ones(200, np.float32)
    broken[150] = np.nan
    found = select(gc.ChunkedTopK(0.1, chunk, zeros=zeros), *layers, broken)
    for layer, indices, values, k in zip(layers, found.indices, found.values, found.limits, strict=False):
        n, expected = len(layer), []
        for a in range(0, n, chunk):
            b = min(a + chunk, n)
            share = k * b // n - k * a // n
            part = layer[a:b]
            expected += [a + i for i in largest(part, share) if zeros or part[i] != 0]
        assert indices == expected
        assert np.array_equal(np.array(values, np.float32), layer[expected])
    assert found.flags == [0] * len(layers) + [1]


@every_world
def test_a_residual_decays(world: int):
    """In the mean over ranks e' = d e + g less what was sent: what has decayed is neither sent nor kept."""
    ranks = Simulation(LAYERS, gc.ChunkedTopK(0.1, 50, 0.5), world)
    owed = [np.zeros(layer.size) for layer in LAYERS]
    for step in range(STEPS):
        given = gradients(step, world)
        means = ranks.step(given).all_means()
        for i, layer in enumerate(LAYERS):
            owed[i] = 0.5 * owed[i] + true_mean(given, i) - means[i]
            np.testing.assert_allclose(
                ranks.owed(i).reshape(-1), owed[i], rtol=1e-4, atol=1e-5, err_msg=layer.name
            )
