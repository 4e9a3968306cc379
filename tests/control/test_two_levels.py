"""Accordion: low compression while norms change. AdaQS: precision doubles as mean / deviation falls."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from control.observed import chosen, environment, seen_by
from control.resumed import after_step, check_resumed
from loudest import LAYERS, levels

from gradcomp import LayerSpec, PowerSGD, Quantize, TopK, Warmup
from gradcomp.control.two_levels import NEVER, Accordion, AdaQS, critical, remembered
from gradcomp.testing.simulation import Simulation

ACCORDION, ADAQS = Accordion(8, 2, every_steps=3), AdaQS(8, 2, every_steps=3)


@pytest.mark.parametrize(
    ("previous", "now", "expected"),
    [
        ([10.0] * 5, [15.0, 14.99, 5.0, 5.01, 10.0], [True, False, True, False, False]),
        ([NEVER] * 3, [0.0, 1e-30, 1e30], [True] * 3),  # the first period
        ([0.0, 0.0, 1e300, 1e-300, 5.0], [0.0, 1.0, 1e-300, 1e300, 5.0], [False, True, True, True, False]),
    ],
)
def test_critical_is_a_change_of_eta_or_more_in_either_direction(previous, now, expected):
    assert critical(np.array(previous), np.array(now), 0.5).tolist() == expected


def test_an_equal_norm_is_not_critical_under_the_smallest_eta():
    assert not critical(np.array([5.0]), np.array([5.0]), 1e-300).any()


def test_norms_of_layers_without_gradient_stay():
    assert remembered(np.array([3.0, NEVER, 3.0]), np.array([0.0, 0.0, 4.0])).tolist() == [3.0, NEVER, 4.0]


def test_accordion_goes_high_when_norms_stay_and_back_when_they_jump():
    current, memory, found = None, None, []
    for norms in ([1, 1], [1, 1], [1.1, 2], [1, 2], [9, 2]):
        observed = seen_by(ACCORDION, [64, 64], norms, current=current, memory=memory)
        decision = ACCORDION.decide(observed)
        current, memory = decision.choices, decision.memory
        found.append(chosen(observed, current))
    assert found == [[8, 8], [2, 2], [2, 8], [2, 2], [8, 2]]


def test_compressors_of_any_family_may_be_the_levels():
    rule = Accordion(PowerSGD(4), "topk:density=0.01", every_steps=3)
    assert rule.candidate_levels(environment([640])).choices[0] == (PowerSGD(4), TopK(0.01))


def test_a_matrix_that_is_sent_exactly_under_both_ranks_has_one_choice():
    rule = Accordion(8, 4, every_steps=3)
    observed = seen_by(rule, [64, 6400], [1.0, 1.0], own=PowerSGD(16), memory=[1.0, 1.0])
    assert len(observed.candidates.choices[0]) == 1
    assert chosen(observed, rule.decide(observed).choices)[1] == 4


@pytest.mark.parametrize(("rule", "level"), [(Accordion, 8), (AdaQS, 2)])
@pytest.mark.parametrize("warm_up", [0, 4])
def test_accordion_begins_low_and_adaqs_high(rule, level, warm_up):
    compression = Warmup(Quantize(4, 32), warm_up) if warm_up else Quantize(4, 32)
    ranks = Simulation(LAYERS, compression, 2, controller=rule(8, 2, every_steps=50))
    for step in range(warm_up + 3):
        assert levels(ranks) == ([None] * 5 if step < warm_up else [*[level] * 4, None])
        ranks.step().all_means()


def test_norms_decide_in_a_run():
    layers = [LayerSpec("steady", (8, 8)), LayerSpec("jumps", (8, 8))]
    ranks = Simulation(layers, Quantize(4, 32), 2, controller=Accordion(8, 2, every_steps=5))
    found = []
    for step in range(25):
        sizes = (1.0, 4.0 if 10 <= step < 15 else 1.0)
        ranks.step([[np.full(64, size, np.float32) for size in sizes] for _ in range(2)]).all_means()
        found.append(tuple(levels(ranks)))
    assert list(dict.fromkeys(found)) == [(8, 8), (2, 2), (2, 8)]
    # Norms stay in period 2 (steps 5 to 9), jump up in 3, and down again in 4.
    assert found[9] == (8, 8)
    assert found[13] == (2, 2)
    assert found[19] == found[23] == (2, 8)


@pytest.mark.parametrize(("fall", "expected"), [(0.0, 2), (0.49, 2), (0.5, 8), (0.9, 8)])
def test_a_period_in_which_the_learning_rate_fell_is_critical(fall, expected):
    observed = seen_by(ACCORDION, [64, 64, 64], [1.0, 1.0, 0.0], current=[1, 1, 1], memory=[1.0, 1.0, 1.0])
    decision = ACCORDION.decide(replace(observed, rate_fall=fall))
    assert chosen(observed, decision.choices) == [expected, expected, 2], "a silent layer keeps its level"


def steady() -> Simulation:
    layers = [LayerSpec("a", (8, 8)), LayerSpec("b", (8, 8))]
    return Simulation(layers, Quantize(4, 32), 2, controller=Accordion(8, 2, every_steps=5))


def step_at(ranks: Simulation, rate: float):
    """A step with steady gradients under this learning rate."""
    ranks.rate = rate
    return ranks.step([[np.ones(64, np.float32) for _ in range(2)] for _ in range(2)])


def falling(step: int) -> float:
    return 0.1 if step < 22 else 0.01


def test_a_fall_of_the_learning_rate_in_a_run_leads_back_to_low_compression_for_a_period():
    ranks, found = steady(), []
    for step in range(40):
        step_at(ranks, falling(step)).all_means()
        found.append(levels(ranks)[0])
    changes = [i for i in range(1, len(found)) if found[i] != found[i - 1]]
    # High once norms stay; low after the period of the fall, 20 to 24; high after the next one.
    assert [found[i] for i in changes] == [2, 8, 2]
    assert 25 <= changes[1] < 30 <= changes[2] < 35


@pytest.mark.parametrize(
    "rate", [lambda step: 0.1 * 0.97**step, lambda step: 0.01 * (step + 1), lambda step: 0.0]
)
def test_a_rate_that_falls_little_rises_or_is_not_known_is_not_critical(rate):
    ranks = steady()
    for step in range(40):
        step_at(ranks, rate(step)).all_means()
        assert step < 15 or levels(ranks)[0] == 2


def test_rates_are_resumed():
    check_resumed(
        steady, lambda ranks, n: after_step(ranks, step_at(ranks, falling(n)))[:2], 40, range(20, 30)
    )


# --- AdaQS --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "own", "ratios", "expected"),
    [
        (ADAQS, None, [1.0, 0.51, 0.5, 0.26, 0.25, 0.1], [2, 2, 4, 4, 8, 8]),  # it rises as the ratio halves
        (ADAQS, None, [1.0, 0.5, 9.0, 9.0], [2, 4, 4, 4]),  # it never falls
        (ADAQS, None, [1.0, 4.0, 0.6, 0.5, 0.3], [2, 2, 2, 4, 4]),  # the ratio at the last change counts
        (ADAQS, None, [0.0, 1.0, 0.0, 0.0, 1.0, 0.5], [2, 2, 4, 4, 4, 8]),  # nothing falls from zero
        (AdaQS(5, 1, every_steps=3), None, [1, 0.1, 0.01, 0.001], [1, 2, 4, 5]),  # the last step ends at low
        (AdaQS(0.05, 0.01, every_steps=3), TopK(0.01), [1, 0.1, 0.01, 0.001], [0.01, 0.02, 0.04, 0.05]),
        # Between compressors there is one step.
        (AdaQS(Quantize(8), "quantize:bits=3", every_steps=3), None, [1, 0.1, 0.01], [3, 8, 8]),
    ],
)
def test_precision_rises_when_the_ratio_falls(rule, own, ratios, expected):
    current, memory, found = None, None, []
    for ratio in ratios:
        observed = seen_by(rule, [64], [1.0], mean=[-ratio], current=current, memory=memory, own=own)
        decision = rule.decide(observed)
        current, memory = decision.choices, decision.memory
        found += chosen(observed, current)
    assert found == expected


def test_layers_without_gradient_or_deviation_keep_what_they_have():
    about = {"mean": [0.1, 0.1], "deviation": [1, 0], "current": [2, 1], "memory": [9.0, 9.0]}
    decision = ADAQS.decide(seen_by(ADAQS, [64, 64], [0.0, 1.0], **about))
    assert decision.choices.tolist() == [2, 1]
    assert decision.memory.tolist() == [9.0, 9.0]


def test_extreme_moments_do_not_end_in_nan():
    observed = seen_by(ADAQS, [64] * 2, [1, 1], mean=[1e-300, 1e300], deviation=[1e300, 1e-5], memory=[1, 1])
    assert not np.isnan(ADAQS.decide(observed).memory).any()


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
