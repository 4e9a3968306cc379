"""Accordion: low compression first, high once norms settle, low again when they jump."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from control.observed import chosen, environment, seen_by
from loudest import LAYERS, levels

from gradcomp import ConfigError, LayerSpec, PowerSGD, Quantize, TopK, Warmup
from gradcomp.control.two_levels import NEVER, Accordion, critical, remembered
from gradcomp.exchange.snapshot import restore, snapshot
from gradcomp.testing.simulation import Simulation

RULE = Accordion(8, 2, every_steps=3)


def test_critical_is_a_change_of_eta_or_more_in_either_direction():
    previous = np.array([10.0, 10.0, 10.0, 10.0, 10.0])
    now = np.array([15.0, 14.99, 5.0, 5.01, 10.0])
    assert critical(previous, now, 0.5).tolist() == [True, False, True, False, False]


def test_the_first_period_is_critical():
    assert critical(np.full(3, NEVER), np.array([0.0, 1e-30, 1e30]), 0.5).all()


def test_extremes():
    previous = np.array([0.0, 0.0, 1e300, 1e-300, 5.0])
    now = np.array([0.0, 1.0, 1e-300, 1e300, 5.0])
    assert critical(previous, now, 0.5).tolist() == [False, True, True, True, False]
    assert not critical(np.array([5.0]), np.array([5.0]), 1e-12).any()


def test_norms_of_layers_without_gradient_stay():
    assert remembered(np.array([3.0, NEVER, 3.0]), np.array([0.0, 0.0, 4.0])).tolist() == [3.0, NEVER, 4.0]


def test_it_goes_high_when_norms_settle_and_back_when_they_jump():
    observed = seen_by(RULE, [64, 64], [1.0, 1.0])
    found = []
    for norms in ([1, 1], [1, 1], [1.1, 2], [1, 2], [9, 2]):
        observed = seen_by(RULE, [64, 64], norms, current=observed.current, memory=observed.memory)
        decision = RULE.decide(observed)
        observed = seen_by(RULE, [64, 64], norms, current=decision.choices, memory=decision.memory)
        found.append(chosen(observed, decision.choices))
    assert found == [[8, 8], [2, 2], [2, 8], [2, 2], [8, 2]]


def test_silent_layers_keep_their_choice_and_norm():
    observed = seen_by(RULE, [64, 64], [0.0, 0.0], current=[1, 0], memory=[3.0, NEVER])
    decision = RULE.decide(observed)
    assert decision.choices.tolist() == [1, 0]
    assert decision.memory.tolist() == [3.0, NEVER]


def test_compressors_of_any_family_may_be_the_levels():
    rule = Accordion(PowerSGD(4), "topk:density=0.01", every_steps=3)
    assert [c.to_string() for c in rule.candidate_levels(environment([640])).choices[0]] == [
        PowerSGD(4).to_string(),
        TopK(0.01).to_string(),
    ]


def test_a_matrix_that_is_sent_exactly_under_both_ranks_has_one_choice():
    rule = Accordion(8, 4, every_steps=3)
    observed = seen_by(rule, [64, 6400], [1.0, 1.0], own=PowerSGD(16), memory=[1.0, 1.0])
    decision = rule.decide(observed)
    assert len(observed.candidates.choices[0]) == 1
    assert chosen(observed, decision.choices)[1] == 4


@pytest.mark.parametrize("warm_up", [0, 4])
def test_layers_begin_at_low_compression(warm_up):
    compression = Warmup(Quantize(4, 32), warm_up) if warm_up else Quantize(4, 32)
    ranks = Simulation(LAYERS, compression, 2, controller=Accordion(8, 2, every_steps=50))
    for step in range(warm_up + 3):
        assert levels(ranks) == ([None] * 5 if step < warm_up else [8, 8, 8, 8, None])
        ranks.step().all_means()


def test_norms_decide_in_a_run():
    layers = [LayerSpec("steady", (8, 8)), LayerSpec("jumps", (8, 8))]
    ranks = Simulation(layers, Quantize(4, 32), 2, controller=Accordion(8, 2, every_steps=5))
    found = []
    for step in range(25):
        gradients = ranks.gradients()
        for rank in gradients:
            rank[0][:] = 1.0
            rank[1][:] = 4.0 if 10 <= step < 15 else 1.0
        ranks.step(gradients).all_means()
        found.append(tuple(levels(ranks)))
    assert list(dict.fromkeys(found)) == [(8, 8), (2, 2), (2, 8)]
    # Period 2 (steps 5 to 9) settles, 3 jumps up, 4 down again.
    assert found[9] == (8, 8)
    assert found[13] == (2, 2)
    assert found[19] == found[23] == (2, 8)


@pytest.mark.parametrize(("fall", "expected"), [(0.0, 2), (0.49, 2), (0.5, 8), (0.9, 8)])
def test_a_period_in_which_the_learning_rate_fell_is_critical(fall, expected):
    observed = seen_by(RULE, [64, 64, 64], [1.0, 1.0, 0.0], current=[1, 1, 1], memory=[1.0, 1.0, 1.0])
    decision = RULE.decide(replace(observed, rate_fall=fall))
    assert chosen(observed, decision.choices) == [expected, expected, 2], "a silent layer keeps its level"


def rates_in_a_run(rate, steps: int = 40, stop: int | None = None):
    """Levels after every step of a run whose gradients are steady; ``stop``: it is saved there, and resumed."""

    def job():
        layers = [LayerSpec("a", (8, 8)), LayerSpec("b", (8, 8))]
        return Simulation(layers, Quantize(4, 32), 2, controller=Accordion(8, 2, every_steps=5))

    ranks, found = job(), []
    for step in range(steps):
        if step == stop:
            states = [json.loads(json.dumps(p.controller.shared_state())) for p in ranks.pipelines]
            assert states[0] == states[1]
            again = job()
            for old, new, state in zip(ranks.pipelines, again.pipelines, states, strict=True):
                saved = snapshot(old)
                assert saved.shared.control["state"] == state
                restore(new, saved)
            ranks = again
        ranks.rate = rate(step)
        ranks.step([[np.ones(64, np.float32) for _ in range(2)] for _ in range(2)]).all_means()
        found.append(levels(ranks)[0])
    return found


def test_a_fall_of_the_learning_rate_in_a_run_leads_back_to_low_compression_for_a_period():
    found = rates_in_a_run(lambda step: 0.1 if step < 22 else 0.01)
    changes = [i for i in range(1, len(found)) if found[i] != found[i - 1]]
    # High once norms have settled; low after the period of the fall, 20 to 24; high after the next one.
    assert [found[i] for i in changes] == [2, 8, 2]
    assert 25 <= changes[1] < 30 <= changes[2] < 35


@pytest.mark.parametrize(
    "rate", [lambda step: 0.1 * 0.97**step, lambda step: 0.01 * (step + 1), lambda step: 0.0]
)
def test_a_rate_that_falls_little_rises_or_is_not_known_is_not_critical(rate):
    assert rates_in_a_run(rate)[15:] == [2] * 25


@pytest.mark.parametrize("stop", range(20, 30))
def test_rates_are_resumed(stop):
    def rate(step: int) -> float:
        return 0.1 if step < 22 else 0.01

    assert rates_in_a_run(rate, stop=stop) == rates_in_a_run(rate)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"low": 4, "high": 4}, "differ"),
        ({"low": 4, "high": "quantize:bits=2"}, "both"),
        ({"low": True, "high": 2}, "low"),
        ({"low": 4, "high": float("nan")}, "high"),
        ({"low": 4, "high": None}, "high"),
        ({"low": 4, "high": "nothing"}, "unknown"),
        ({"low": 8, "high": 2, "eta": 0}, "eta"),
        ({"low": 8, "high": 2, "eta": float("inf")}, "eta"),
        ({"low": 8, "high": 2, "eta": True}, "eta"),
        ({"low": 8, "high": 2, "rate_fall": 0}, "rate_fall"),
        ({"low": 8, "high": 2, "rate_fall": 1.5}, "rate_fall"),
        ({"low": 8, "high": 2, "every_steps": 0}, "every_steps"),
    ],
)
def test_bad_input(given, words):
    with pytest.raises(ConfigError, match=words):
        Accordion(**{"every_steps": 3, **given})


@pytest.mark.parametrize("world", [1, 2])
def test_levels_the_wrong_way_round(world):
    with pytest.raises(ConfigError, match="swap low and high"):
        Accordion(2, 8, every_steps=3).begin(environment([64], world=world))


def test_a_level_that_layers_cannot_take():
    with pytest.raises(ConfigError, match="bits"):
        Accordion(99, 2, every_steps=3).begin(environment([64]))
