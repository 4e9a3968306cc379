"""Which layer gets which compressor, and why."""

from __future__ import annotations

import pytest

from gradcomp import Cast, ConfigError, Filter, Identity, LayerSpec, Policy, Quantize
from gradcomp.compress import as_policy, at_level

EXACT = Cast("float32")
WEIGHT = LayerSpec("block.weight", (64, 64))

CNN = [
    LayerSpec("conv1.weight", (32, 3, 5, 5)),
    LayerSpec("conv1.bias", (32,), kind="bias"),
    LayerSpec("norm1.weight", (32,), kind="norm"),
    LayerSpec("norm1.bias", (32,), kind="norm"),
    LayerSpec("conv2.weight", (64, 32, 3, 3)),
    LayerSpec("embedding.weight", (1000, 16), kind="embedding"),
    LayerSpec("squeeze.weight", (4, 64)),
    LayerSpec("scale", (4096,)),
    LayerSpec("statistics", (64, 64), "float64"),
    LayerSpec("head.weight", (10, 1024)),
    LayerSpec("head.bias", (10,), kind="bias"),
]


def chosen(policy: Policy, layers=CNN) -> dict[str, str]:
    plan = policy.plan(layers)
    plan.check_covers(layers)
    return {a.layer: at_level(a.compressor, a.level).to_string() for a in plan.assignments}


def test_plan_of_a_small_cnn():
    quantize, exact = Quantize(3, 128).to_string(), EXACT.to_string()
    policy = Policy(Quantize(3, 128), overrides={"head.*": "none", "embedding.*": Quantize(2, 128)})
    assert chosen(policy) == {
        "conv1.weight": quantize,
        "conv1.bias": exact,
        "norm1.weight": exact,
        "norm1.bias": exact,
        "conv2.weight": quantize,
        "embedding.weight": Quantize(2, 128).to_string(),
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


def test_without_compression_everything_is_an_exact_sum():
    assert set(chosen(Policy()).values()) == {"none"}
    assert set(chosen(Policy(overrides={"head.*": "none"})).values()) == {"none"}


def test_one_compressed_layer_leaves_the_others_exact():
    got = chosen(Policy(overrides={"conv2.weight": Quantize(4)}))
    assert {name for name, text in got.items() if text != "none"} == {"conv2.weight"}


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
        ({"include": ("*.bias",)}, LayerSpec("a.bias", (3,), kind="bias"), None),
        ({"include": ("*",)}, LayerSpec("a", (64, 64), "float64"), "float64"),
        (
            {"exclude_kinds": (), "min_dimensions": 0, "min_elements": 0},
            LayerSpec("a", (0,), kind="bias"),
            None,
        ),
    ],
)
def test_filter(settings, layer: LayerSpec, reason: str | None):
    assert Filter(**settings).reason_to_exclude(layer) == reason


def test_first_matching_override_wins_and_beats_the_filter():
    policy = Policy(Quantize(4), overrides={"*.bias": Quantize(8), "a.*": Quantize(2)})
    bias = LayerSpec("a.bias", (3,), kind="bias")
    assert policy.choose(bias) == (Quantize(8), None)
    assert policy.choose(LayerSpec("a.weight", (3,))) == (Quantize(2), None)


def test_plan_carries_the_version_and_the_order_of_the_layers():
    plan = Policy(Quantize(4)).plan(CNN, version=7)
    assert plan.version == 7
    assert [a.layer for a in plan.assignments] == [layer.name for layer in CNN]


@pytest.mark.parametrize(
    "given", [Quantize(2), "quantize:bits=2", Policy(Quantize(2)), Policy("quantize:bits=2")]
)
def test_every_way_to_ask_for_a_compressor_means_the_same(given):
    assert as_policy(given).plan([WEIGHT]) == Policy(Quantize(2)).plan([WEIGHT])


@pytest.mark.parametrize("given", [4, None, Quantize, "quantise"])
def test_anything_else_is_refused(given):
    with pytest.raises(ConfigError):
        as_policy(given)


@pytest.mark.parametrize(
    "settings", [{"default": 4}, {"overrides": {"a": "quantise"}}, {"overrides": {"a": None}}]
)
def test_a_policy_is_checked_when_it_is_made(settings):
    with pytest.raises(ConfigError):
        Policy(**settings)


def test_the_default_policy_compresses_nothing():
    assert Policy().default == Identity()
