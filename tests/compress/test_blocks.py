"""Tests levels by block of rows: where blocks lie, what they send, and that equal levels act as one."""

from __future__ import annotations

import numpy as np
import pytest
from exchange.test_requests import Ranked, inputs_of
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples

import gradcomp as gc
from gradcomp.compress import at_level, from_string
from gradcomp.compress.blocks import LEAST_BUCKETS, borders, count_for
from gradcomp.core.topology import Topology
from gradcomp.exchange.requests import ALL_GATHER, REDUCE_SCATTER, Request
from gradcomp.testing.simulation import Simulation, plan_for, same_bytes, true_mean

LAYERS = [
    gc.LayerSpec("a", (33, 20)),
    gc.LayerSpec("b", (40, 7, 3), "float16"),
    gc.LayerSpec("c", (150,)),
    gc.LayerSpec("d", (2, 500)),
    gc.LayerSpec("e", (0, 8)),
]
SMALL = {"slice_elements": 200}  # slices end inside blocks

shapes = st.lists(st.integers(1, 40), min_size=1, max_size=3).map(tuple)


@given(shapes, st.integers(2, 40), st.integers(1, 90))
@examples(60)
def test_blocks_are_rows_up_to_the_bucket_in_which_they_begin(shape, count, unit):
    layer = gc.LayerSpec("w", shape)
    at = borders(layer, count, unit)
    rows = shape[0] if len(shape) > 1 else layer.size
    width = layer.size // rows
    assert (at[0], at[-1], len(at)) == (0, layer.size, count + 1)
    assert at == sorted(at)
    for i, border in enumerate(at[1:-1], 1):
        assert border % unit == 0
        assert 0 <= rows * i // count * width - border < unit


@given(shapes, st.integers(1, 256), st.sampled_from([1, 16, 33]))
@examples(60)
def test_blocks_of_a_controller_are_not_too_small(shape, most, size):
    layer = gc.LayerSpec("w", shape)
    count = count_for(layer, gc.Quantize(4, size), most)
    assert 1 <= count <= most
    if len(shape) == 1:
        assert count == 1
    if count > 1:
        assert count <= shape[0]
        assert layer.size >= count * LEAST_BUCKETS * size
        assert 0 not in np.diff(borders(layer, count, size))


def means_of(compressor: gc.Compressor, world: int, **settings):
    """Returns the means of three steps."""
    ranks = Simulation(LAYERS, compressor, world, **settings)
    return [ranks.step().all_means() for _ in range(3)]


@pytest.mark.parametrize(
    ("around", "settings"),
    [
        (lambda c: c, {"reduction": "ring", **SMALL}),
        (lambda c: c, {"reduction": "all_to_all"}),
        (lambda c: c, {"reduction": "hierarchical", "topology": Topology([0, 0, 1])}),
        (lambda c: gc.MomentumCorrection(c, factor=0.5), SMALL),
        (lambda c: gc.LocalClip(c, max_norm=2.0), SMALL),
        (gc.ErrorFeedback, SMALL),
        (gc.EF21, {}),
    ],
)
def test_equal_levels_are_a_single_level_bit_for_bit(around, settings):
    blocks, single = (
        means_of(around(gc.Quantize(bits, 21, rounding="nearest", feedback=True)), 3, **settings)
        for bits in ((4, 4, 4, 4, 4), 4)
    )
    for mine, theirs in zip(blocks, single, strict=True):
        assert all(map(same_bytes, mine, theirs))


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize(
    "compressor",
    [gc.Quantize(4, 16), gc.Quantize(4, 16, rounding="nearest"), gc.Quantize(4, 16, "linf")],
    ids=str,
)
@pytest.mark.parametrize("settings", [{}, SMALL], ids=["whole", "slices"])
def test_a_block_is_what_it_would_be_alone(world, compressor, settings):
    """In three steps, each block has the mean of a layer at its level, with and without residuals."""
    settings = {"reorder": False, **settings}  # second residuals that move change rounding
    levels = (2, 7, 4)
    mixed = means_of(compressor.with_level(levels), world, **settings)
    single = {bits: means_of(compressor.with_level(bits), world, **settings) for bits in levels}
    for step, means in enumerate(mixed):
        for number, layer in enumerate(LAYERS):
            at = borders(layer, 3, 16)
            for begin, end, bits in zip(at[:-1], at[1:], levels, strict=True):
                np.testing.assert_array_equal(means[number][begin:end], single[bits][step][number][begin:end])
    lost = {bits: np.square(single[bits][0][0] - mixed[0][0]).sum() for bits in levels}
    assert all(lost.values())  # no level is that of the whole layer


@pytest.mark.parametrize("world", [2, 3])
def test_feedback_telescopes_through_changes_to_blocks_and_back(world):
    """The residuals hold the true means minus the applied means, however the plan is changed."""
    first, *proposed = (
        gc.Quantize(bits, 16, rounding="nearest") for bits in (4, (2, 6), (5, 3, 4), (3, 3, 2, 6, 4), 3)
    )
    chosen = gc.TopK(0.1), gc.Quantize((2, 6, 3), 16, rounding="nearest"), gc.TopK(0.1)
    ranks, missing = Simulation(LAYERS, first, world, **SMALL), [np.zeros(layer.size) for layer in LAYERS]
    levels = set()
    for step in range(24):
        for pipeline in ranks.pipelines:
            if step in (2, 4, 6, 8):
                pipeline.propose(plan_for(LAYERS, proposed[step // 2 - 1], step // 2))
            if step in (10, 14, 18):
                pipeline.set_compression(plan_for(LAYERS, chosen[(step - 10) // 4]), {})
        gradients = ranks.gradients()
        for i, mean in enumerate(ranks.step(gradients).all_means()):
            missing[i] += true_mean(gradients, i) - mean
        levels.add(ranks.pipelines[0].plan.assignments[0].level)
    assert levels == {form.level for form in (first, *proposed, *chosen)}
    assert ranks.pipelines[0].plan.assignments[0].level == chosen[-1].level
    for i, layer in enumerate(LAYERS):
        close = 2e-5 if layer.dtype == "float32" else 0.2
        np.testing.assert_allclose(missing[i], ranks.owed(i), atol=close)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("kind", [REDUCE_SCATTER, ALL_GATHER])
def test_requests_between_steps_take_blocks(kind, world):
    layers = [layer for layer in LAYERS if layer.dtype == "float32"]
    # Shards begin with a quantisation bucket: then blocks change no scale.
    shards = tuple(
        (*(layer.size * j // world // 16 * 16 for j in range(world)), layer.size) for layer in layers
    )
    found = {}
    for bits in ((5, 5, 5), 5, (2, 7, 4), 2, 7, 4):
        ranked = Ranked(Request.of(kind, layers, gc.Quantize(bits, 16), borders=shards), world)
        found[bits] = ranked.run(inputs_of(ranked))
    for number, layer in enumerate(layers):
        lengths = np.diff(borders(layer, 3, 16))
        for rank in range(world):
            np.testing.assert_array_equal(found[5, 5, 5][rank][number], found[5][rank][number])
            own = slice(*shards[number][rank : rank + 2]) if kind == REDUCE_SCATTER else slice(None)
            by_level = [found[bits][rank][number].reshape(-1) for bits in (2, 7, 4)]
            expected = np.choose(np.repeat([0, 1, 2], lengths)[own], by_level)
            np.testing.assert_array_equal(found[2, 7, 4][rank][number].reshape(-1), expected)


@pytest.mark.parametrize("allocate", ["bucket", "bytes"])
@pytest.mark.parametrize("reduction", ["sra", "ring"])
def test_bits_by_bucket_keep_the_error_of_each_block(allocate, reduction):
    layers, gradients = [gc.LayerSpec("a", (60, 96))], None
    lost = {}
    for form in (None, allocate):
        ranks = Simulation(layers, gc.Quantize((2, 4, 6), 32, allocate=form), 3, reduction=reduction, **SMALL)
        gradients = gradients or ranks.gradients()
        errors = ranks.step(gradients).mean(0) - np.mean([rank[0] for rank in gradients], axis=0)
        lost[form] = np.square(errors).reshape(3, -1).sum(axis=1)
    assert (lost[None][:-1] > 8 * lost[None][1:]).all()
    assert (lost[allocate] < 1.3 * lost[None]).all()


def test_a_fixed_plan_reads_blocks():
    plan = plan_for(LAYERS, gc.Quantize((2, 6, 3), 16))
    forms = {"*": "quantize:bits=2/6/3,bucket_size=16"}
    for source in (plan.to_json(), forms):
        ranks = Simulation(LAYERS, gc.Quantize(4, 16), 2, controller=gc.FixedPlan(source))
        for _ in range(3):
            ranks.step().all_means()
        assert {a.level for a in ranks.pipelines[0].plan.assignments} == {(2, 6, 3)}
    with pytest.raises(gc.ConfigError):
        gc.FixedPlan({"*": [2, 6, 3]})


def test_plans_hold_blocks():
    compressor = gc.ErrorFeedback(gc.Quantize((3, 4, 4, 2), 128, rounding="nearest"))
    assert compressor.family_string() == compressor.with_level(4).family_string()
    plan = gc.Plan(3, (gc.Assignment("a", compressor.family_string(), compressor.level),))
    assert '",[3,4,4,2]]' in plan.to_json()
    assert gc.Plan.from_json(plan.to_json()) == plan
    assert from_string(compressor.to_string()) == compressor
    assert at_level(compressor.family_string(), compressor.level) == compressor


@pytest.mark.parametrize("levels", [[0, 4], [4, 9], [10**30, 4]], ids=str)
def test_a_plan_with_impossible_levels_is_refused(levels):
    family = gc.Quantize(4).family_string()
    plan = gc.Plan.from_json(f'{{"assignments":[["a","{family}",{levels}]],"version":1}}')
    with pytest.raises(gc.ConfigError):
        Simulation([gc.LayerSpec("a", (64, 64))], plan, 2)
