"""Menus: the papers' ranges, bounded by what a layer allows, with the bytes that are really sent."""

from __future__ import annotations

import numpy as np
import pytest
from control.observed import environment_of

from gradcomp import (
    Cast,
    ConfigError,
    Identity,
    LayerSpec,
    MomentumCorrection,
    PowerSGD,
    Quantize,
    Threshold,
    TopK,
    Warmup,
)
from gradcomp.compress import Policy
from gradcomp.control.candidates import choices_of, default_levels, layer_bytes, make_candidates
from gradcomp.core.layers import Filter
from gradcomp.core.scheme import parse
from gradcomp.core.topology import Topology
from gradcomp.testing.simulation import Simulation

WIDE = LayerSpec("wide", (64, 96))


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        (Quantize(4), [2, 3, 4, 5, 6, 7, 8]),
        (Quantize(1), [1, 2]),
        (Quantize(8), [4, 5, 6, 7, 8]),
        (PowerSGD(4), [2, 3, 4, 5, 6, 7, 8]),
        (MomentumCorrection(Quantize(2)), [1, 2, 3, 4]),
    ],
)
def test_default_ranges_of_whole_levels(own, expected):
    assert default_levels(own) == expected


def test_default_range_of_densities():
    levels = default_levels(TopK(0.01))
    assert len(levels) == 100
    assert levels[0] == 0.001
    assert levels[9] == 0.01
    assert levels[-1] == 0.1
    assert max(default_levels(TopK(0.3))) <= 1.0
    assert 0.3 in default_levels(TopK(0.3))


@pytest.mark.parametrize("own", [Threshold(0.1), Cast("bfloat16")])
def test_no_default_range(own):
    with pytest.raises(ConfigError, match="levels="):
        default_levels(own)


def test_ranks_at_which_a_matrix_travels_exactly_are_one_choice():
    # 8 x 9: rank 5 has 85 elements in its factors, the matrix 72; rank 4 has 68.
    found = choices_of(LayerSpec("m", (8, 9)), PowerSGD(4), None)
    assert [c.rank for c in found] == [2, 3, 4, 5]


def test_the_reference_is_always_a_choice_and_no_choice_comes_twice():
    found = choices_of(WIDE, Quantize(4), [Quantize(2), "quantize:bits=2", 3, 5, "powersgd:rank=2"])
    assert found == (Quantize(2), Quantize(3), Quantize(5), PowerSGD(2), Quantize(4))


@pytest.mark.parametrize(
    ("own", "candidates", "match"),
    [
        (Quantize(4), [], "empty"),
        *[(Quantize(4), given, "outside") for given in ([5, 6, 7], [2, 3])],
        *[(Quantize(4), given, "levels must be") for given in ([True], [None])],
        (Quantize(4), [3.5, 9], "bits"),
        (Quantize(4), ["nonsense"], "unknown compression"),
        (Cast("bfloat16"), [3], "no level"),
    ],
)
def test_candidates_that_cannot_be(own, candidates, match):
    with pytest.raises(ConfigError, match=match):
        choices_of(WIDE, own, candidates)


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize(
    ("own", "reduction"),
    [
        *[
            (own, way)
            for own in (Quantize(4), Cast("bfloat16"))
            for way in ("sra", "ring", "parameter_server")
        ],
        # Gathers and sums do not take the reduction.
        *[(own, "sra") for own in (TopK(0.05), PowerSGD(3), Identity())],
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_predicted_bytes_are_those_sent(own, world, reduction):
    layers = [LayerSpec("a", (256, 96)), LayerSpec("b", (300,)), LayerSpec("c", (40, 1000))]
    ranks = Simulation(
        layers,
        Policy(own, filter=Filter(min_elements=0, min_dimensions=0, exclude_kinds=())),
        world,
        reduction=reduction,
        statistics_every_steps=0,
    )
    steps = 4  # the order of buckets is agreed upon in the first
    for _ in range(steps):
        before = [p.transport.bytes_sent for p in ranks.pipelines]
        ranks.step()
    sent = np.mean([p.transport.bytes_sent - b for p, b in zip(ranks.pipelines, before, strict=True)])
    predicted = sum(layer_bytes(own, layer, parse(reduction), Topology.one_host(world)) for layer in layers)
    assert predicted == pytest.approx(ranks.pipelines[0].predicted.sum(), rel=1e-3)
    assert predicted <= sent <= 1.02 * predicted + 400  # headers


def test_layers_that_are_not_up_for_choice():
    policy = Policy(Warmup(Quantize(4), 10), overrides={"head*": "none", "embedding": TopK(0.01)})
    layers = [
        LayerSpec("wide", (64, 96)),
        LayerSpec("bias", (64,), kind="bias"),
        LayerSpec("head.weight", (64, 96)),
        LayerSpec("double", (64, 96), "float64"),
        LayerSpec("embedding", (64, 96)),
    ]
    assert policy.adjustable(layers) == [Quantize(4), None, None, None, TopK(0.01)]
    assert policy.last_change == 10
    candidates = make_candidates(environment_of(layers, policy.adjustable(layers)), None)
    assert candidates.layers.tolist() == [0, 4]
    assert [len(c) for c in candidates.choices] == [7, 100]
    assert np.isinf(candidates.costs[0, 7:]).all()
    assert np.isfinite(candidates.costs[1]).all()
    assert candidates.reference.tolist() == [2, 9]
    assert candidates.find(0, Quantize(4).family_string(), 5) == 3
    assert candidates.find(0, Quantize(4).family_string(), 99) is None
