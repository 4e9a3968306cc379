"""Tests which compressor a policy gives each layer, and the reason that it reports."""

from __future__ import annotations

import numpy as np
import pytest

import gradcomp as gc
from gradcomp.compress import TwoLevelSelection, as_policy, at_level
from gradcomp.testing.simulation import Simulation

EXACT = gc.Cast("float32")
WEIGHT = gc.LayerSpec("block.weight", (64, 64))

CNN = [
    gc.LayerSpec("conv1.weight", (32, 3, 5, 5)),
    gc.LayerSpec("conv1.bias", (32,), kind="bias"),
    gc.LayerSpec("norm1.weight", (32,), kind="norm"),
    gc.LayerSpec("norm1.bias", (32,), kind="norm"),
    gc.LayerSpec("conv2.weight", (64, 32, 3, 3)),
    gc.LayerSpec("embedding.weight", (1000, 16), kind="embedding"),
    gc.LayerSpec("squeeze.weight", (4, 64)),
    gc.LayerSpec("scale", (4096,)),
    gc.LayerSpec("statistics", (64, 64), "float64"),
    gc.LayerSpec("head.weight", (10, 1024)),
    gc.LayerSpec("head.bias", (10,), kind="bias"),
]


def chosen(policy: gc.Policy, layers=CNN) -> dict[str, str]:
    plan = policy.plan(layers)
    plan.check_covers(layers)
    return {a.layer: at_level(a.compressor, a.level).to_string() for a in plan.assignments}


def test_plan_of_a_small_cnn():
    quantize, exact = gc.Quantize(3, 128).to_string(), EXACT.to_string()
    policy = gc.Policy(gc.Quantize(3, 128), overrides={"head.*": "none", "embedding.*": gc.Quantize(2, 128)})
    assert chosen(policy) == {
        "conv1.weight": quantize,
        "conv1.bias": exact,
        "norm1.weight": exact,
        "norm1.bias": exact,
        "conv2.weight": quantize,
        "embedding.weight": gc.Quantize(2, 128).to_string(),
        "squeeze.weight": exact,
        "scale": exact,
        "statistics": "none",
        "head.weight": exact,
        "head.bias": exact,
    }
    assert policy.excluded(CNN) == {
        "conv1.bias": "bias",
        "norm1.weight": "norm",
        "norm1.bias": "norm",
        "squeeze.weight": "fewer than 1024 elements",
        "scale": "fewer than 2 dimensions",
        "statistics": "float64",
        "head.weight": "override 'head.*'",
        "head.bias": "override 'head.*'",
    }


@pytest.mark.parametrize("overrides", [{}, {"head.*": "none"}, {"conv2.weight": gc.Quantize(4)}])
def test_what_is_not_compressed_is_an_exact_sum(overrides):
    assert gc.Policy().default == gc.Identity()
    got = chosen(gc.Policy(overrides=overrides))
    compressed = {name for name in overrides if overrides[name] != "none"}
    assert {name for name, text in got.items() if text != "none"} == compressed


@pytest.mark.parametrize(
    ("settings", "layer", "reason"),
    [
        ({}, WEIGHT, None),
        ({"min_elements": 4096}, WEIGHT, None),
        ({"min_elements": 4097}, WEIGHT, "fewer than 4097 elements"),
        ({"min_dimensions": 3}, WEIGHT, "fewer than 3 dimensions"),
        ({"exclude_kinds": ("weight",)}, WEIGHT, "weight"),
        ({"exclude": ("block.*",)}, WEIGHT, "excluded by name"),
        ({"exclude": ("BLOCK.*",)}, WEIGHT, None),
        ({"include": ("block.*",), "exclude": ("*.weight",)}, WEIGHT, "excluded by name"),
        ({"include": ("*.bias",)}, gc.LayerSpec("a.bias", (3,), kind="bias"), None),
        ({"include": ("*",)}, gc.LayerSpec("a", (64, 64), "float64"), "float64"),
        (
            {"exclude_kinds": (), "min_dimensions": 0, "min_elements": 0},
            gc.LayerSpec("a", (0,), kind="bias"),
            None,
        ),
    ],
)
def test_filter(settings, layer: gc.LayerSpec, reason: str | None):
    assert gc.Filter(**settings).reason_to_exclude(layer) == reason


def test_first_matching_override_wins_and_beats_the_filter():
    policy = gc.Policy(gc.Quantize(4), overrides={"*.bias": gc.Quantize(8), "a.*": gc.Quantize(2)})
    bias = gc.LayerSpec("a.bias", (3,), kind="bias")
    assert policy.choose(bias) == (gc.Quantize(8), None)
    assert policy.choose(gc.LayerSpec("a.weight", (3,))) == (gc.Quantize(2), None)


def test_plan_carries_the_version_and_the_order_of_the_layers():
    plan = gc.Policy(gc.Quantize(4)).plan(CNN, version=7)
    assert plan.version == 7
    assert [a.layer for a in plan.assignments] == [layer.name for layer in CNN]


@pytest.mark.parametrize(
    "given", [gc.Quantize(2), "quantize:bits=2", gc.Policy(gc.Quantize(2)), gc.Policy("quantize:bits=2")]
)
def test_every_way_to_ask_for_a_compressor_means_the_same(given):
    assert as_policy(given).plan([WEIGHT]) == gc.Policy(gc.Quantize(2)).plan([WEIGHT])


@pytest.mark.parametrize("given", [4, None, gc.Quantize, "quantise"])
def test_anything_else_is_refused_when_a_policy_is_made(given):
    for make in (as_policy, gc.Policy, lambda other: gc.Policy(overrides={"a": other})):
        with pytest.raises(gc.ConfigError):
            make(given)


# --- momentum, clipping and schedules ---------------------------------------------------------------------------

TOP = gc.TopK(0.05)
MODEL = [
    gc.LayerSpec("w", (64, 64)),
    gc.LayerSpec("w.bias", (64,), kind="bias"),
    gc.LayerSpec("head", (64, 64)),
    gc.LayerSpec("double", (64, 64), "float64"),
]


SUM, HALF, KEEPING = gc.Identity(), gc.Cast("bfloat16"), gc.Cast("bfloat16", feedback=True)


def momentum(compressor: gc.Compressor) -> gc.MomentumCorrection:
    return gc.MomentumCorrection(compressor, 0.8)


@pytest.mark.parametrize(
    ("default", "exact", "bf16"),
    [
        (TOP, SUM, KEEPING),
        (gc.TopK(0.05, feedback=False), SUM, HALF),
        (TwoLevelSelection(TOP), SUM, KEEPING),
        (gc.Quantize(4), EXACT, HALF),
        (gc.Quantize(4, rounding="nearest"), EXACT, KEEPING),
        (gc.Warmup(TOP, 2), SUM, KEEPING),
        (gc.Warmup(gc.Quantize(4), 2), EXACT, HALF),
        (momentum(TOP), momentum(SUM), momentum(KEEPING)),
        (gc.Warmup(momentum(TOP), 2), momentum(SUM), momentum(KEEPING)),
        (momentum(gc.Warmup(gc.Quantize(4), 2)), momentum(SUM), momentum(HALF)),
        (
            gc.LocalClip(gc.DensitySchedule(momentum(TOP))),
            gc.LocalClip(momentum(SUM)),
            gc.LocalClip(momentum(KEEPING)),
        ),
    ],
)
def test_what_is_excluded_keeps_momentum_and_clipping_in_all_steps(default, exact, bf16):
    for setting, rest in (("float32", exact), ("bf16", bf16)):
        policy = gc.Policy(default, overrides={"head": "none"}, exact=setting)
        assert policy.excluded(MODEL) == {"w.bias": "bias", "head": "override 'head'", "double": "float64"}
        found, reasons = zip(*map(policy.choose, MODEL), strict=True)
        assert reasons == (None, "bias", "override 'head'", "float64")
        head = found[2]  # the user said so
        assert found == (default, rest, head, SUM)
        assert head.traits.exact
        assert setting == "bf16" or head == exact
        assert [c is not None for c in policy.adjustable(MODEL)] == [True, False, False, False]
        begins = policy.scheduled(MODEL)
        changes = {step: plan for step in range(999) if begins is not None and (plan := begins(step, 1))}
        for plan in (policy.plan(MODEL), *changes.values()):
            of_rest = [plan.by_layer[name].compressor for name in ("w.bias", "head")]
            assert of_rest == [rest.family_string(), head.family_string()]
        assert sorted(changes) == sorted(default.changes)


@pytest.mark.parametrize("kind", [gc.TopK(1.0), gc.Quantize(8, 64)])
def test_layers_that_are_excluded_have_the_same_momentum(kind):
    """The optimizer has no momentum, so without it excluded layers would train without any."""
    layers = [
        gc.LayerSpec("w", (40,)),
        gc.LayerSpec("b", (5,), kind="bias"),
        gc.LayerSpec("h", (5,), "float16", kind="bias"),
    ]
    policy = gc.Policy(
        gc.MomentumCorrection(kind, 0.5, mask=False), filter=gc.Filter(min_elements=0, min_dimensions=0)
    )
    ranks = Simulation(layers, policy, 3)
    ones = [[np.ones_like(g) for g in rank] for rank in ranks.gradients()]
    for expected in (1.0, 1.5, 1.75):
        for mean in ranks.step(ones).all_means():
            np.testing.assert_allclose(mean.astype(np.float64), expected, rtol=1e-6)


# --- excluded layers in bfloat16 --------------------------------------------------------------------------------


def test_bfloat16_is_for_layers_that_are_excluded():
    assert set(chosen(gc.Policy(exact="bf16")).values()) == {"none"}
    with pytest.raises(gc.ConfigError, match="exact"):
        gc.Policy(TOP, exact="fp8")


@pytest.mark.parametrize("default", [TOP, gc.Quantize(4, rounding="nearest"), "powersgd:rank=2"])
def test_bfloat16_takes_half_the_bytes_and_loses_nothing_with_feedback(default):
    layers = [gc.LayerSpec("w", (64, 64)), gc.LayerSpec("b", (5000,), kind="bias")]
    sent = {}
    for exact in ("float32", "bf16"):
        ranks = Simulation(layers, gc.Policy(default, exact=exact), 3, slice_elements=1500)
        sent[exact] = ranks.pipelines[0].predicted
        total, applied = np.zeros(5000), np.zeros(5000)
        for _ in range(12):
            gradients = ranks.gradients()
            total += sum(rank[1].astype(np.float64) for rank in gradients) / 3
            applied += ranks.step(gradients).mean(1)
        np.testing.assert_allclose(total - applied, ranks.owed(1), atol=1e-5)
        assert (np.abs(total - applied).max() > 1e-4) == (exact == "bf16")
    assert sent["bf16"][0] == sent["float32"][0]
    assert sent["bf16"][1] == pytest.approx(sent["float32"][1] / 2, rel=0.02)
