"""AdaQS: precision doubles whenever mean / deviation has fallen far enough, and never falls."""

from __future__ import annotations

import numpy as np
import pytest
from control.observed import chosen, environment, seen_by
from loudest import LAYERS, levels

from gradcomp import ConfigError, LayerSpec, Quantize, TopK
from gradcomp.control.two_levels import AdaQS
from gradcomp.testing.simulation import Simulation

RULE = AdaQS(8, 2, every_steps=3)


def follow(ratios, rule=RULE, **about):
    """The levels of one layer after each of these ratios."""
    current, memory, found = None, None, []
    for ratio in ratios:
        observed = seen_by(rule, [64], [1.0], mean=[-ratio], current=current, memory=memory, **about)
        decision = rule.decide(observed)
        current, memory = decision.choices, decision.memory
        found += chosen(observed, current)
    return found


def test_precision_rises_when_the_ratio_halves():
    assert follow([1.0, 0.51, 0.5, 0.26, 0.25, 0.1]) == [2, 2, 4, 4, 8, 8]


def test_precision_never_falls():
    assert follow([1.0, 0.5, 9.0, 9.0]) == [2, 4, 4, 4]


def test_the_ratio_at_the_last_change_is_what_counts():
    assert follow([1.0, 4.0, 0.6, 0.5, 0.3]) == [2, 2, 2, 4, 4]


def test_a_ratio_of_zero_is_never_what_others_fall_from():
    assert follow([0.0, 1.0, 0.0, 0.0, 1.0, 0.5]) == [2, 2, 4, 4, 4, 8]


def test_the_last_step_ends_at_low():
    assert follow([1, 0.1, 0.01, 0.001], AdaQS(5, 1, every_steps=3)) == [1, 2, 4, 5]


def test_densities_double_as_well():
    rule = AdaQS(0.05, 0.01, every_steps=3)
    assert follow([1, 0.1, 0.01, 0.001], rule, own=TopK(0.01)) == [0.01, 0.02, 0.04, 0.05]


def test_between_compressors_there_is_one_step():
    rule = AdaQS(Quantize(8), "quantize:bits=3", every_steps=3)
    assert follow([1, 0.1, 0.01], rule) == [3, 8, 8]


def test_layers_without_gradient_or_deviation_keep_what_they_have():
    observed = seen_by(
        RULE, [64, 64], [0.0, 1.0], mean=[0.1, 0.1], deviation=[1, 0], current=[2, 1], memory=[9.0, 9.0]
    )
    decision = RULE.decide(observed)
    assert decision.choices.tolist() == [2, 1]
    assert decision.memory.tolist() == [9.0, 9.0]


def test_extremes_do_not_end_in_nan():
    observed = seen_by(RULE, [64] * 2, [1, 1], mean=[1e-300, 1e300], deviation=[1e300, 1e-5], memory=[1, 1])
    assert not np.isnan(RULE.decide(observed).memory).any()


def test_layers_begin_at_high_compression():
    ranks = Simulation(LAYERS, Quantize(4, 32), 2, controller=AdaQS(8, 2, every_steps=50))
    assert levels(ranks) == [2, 2, 2, 2, None]
    ranks.step().all_means()
    assert levels(ranks) == [2, 2, 2, 2, None]


def test_noise_raises_the_precision_in_a_run():
    layers = [LayerSpec("steady", (8, 8)), LayerSpec("noisy", (8, 8))]
    ranks = Simulation(layers, Quantize(4, 32), 2, controller=AdaQS(8, 2, every_steps=5))
    for step in range(24):
        gradients = ranks.gradients(size=0.1)
        for rank in gradients:
            rank[0] += 1.0
            rank[1] += 0.1 if step >= 5 else 1.0
        ranks.step(gradients).all_means()
    assert levels(ranks) == [2, 4]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"low": 2, "high": 2}, "differ"),
        ({"low": 2, "high": 8}, "below low"),
        ({"low": 2, "high": 0}, "above 0"),
        ({"factor": 1.0}, "factor"),
        ({"factor": 0}, "factor"),
        ({"factor": float("nan")}, "factor"),
        ({"factor": "x"}, "factor"),
    ],
)
def test_bad_input(given, words):
    with pytest.raises(ConfigError, match=words):
        AdaQS(**{"low": 8, "high": 2, "every_steps": 3, **given})


def test_a_level_that_layers_cannot_take():
    with pytest.raises(ConfigError, match="bits"):
        AdaQS(99, 2, every_steps=3).begin(environment([64]))
