"""Formats of block floats as levels: they have no number, so a controller chooses among compressors."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from control.observed import environment
from control.resumed import after_step, check_resumed
from loudest import levels

from gradcomp import Accordion, BlockFloat, KMeans, LayerSpec, LGreCo, Linear, MomentumCorrection, Quantize
from gradcomp.control import controller_from_string
from gradcomp.control.candidates import crowded_ends, default_levels, make_candidates
from gradcomp.core.plan import Plan, histogram
from gradcomp.testing.simulation import Simulation

LAYERS = [LayerSpec("quiet", (64, 96)), LayerSpec("b", (300, 20)), LayerSpec("loud", (40, 500))]
EIGHT, FOUR = BlockFloat("fp8_e4m3"), BlockFloat("fp4_e2m1")
STEPS = 14


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        (EIGHT, [EIGHT, FOUR]),
        (FOUR, [EIGHT, FOUR]),
        (BlockFloat("fp8_e5m2", 64), [BlockFloat(f, 64) for f in ("fp8_e4m3", "fp8_e5m2", "fp4_e2m1")]),
        (
            BlockFloat("fp4_e2m1", 16, scale="e4m3"),
            [BlockFloat("fp8_e4m3", 16), BlockFloat("fp4_e2m1", 16, scale="e4m3")],
        ),
        (MomentumCorrection(EIGHT), [MomentumCorrection(EIGHT), MomentumCorrection(FOUR)]),
    ],
)
def test_the_default_range_is_eight_and_four_bits(own, expected):
    assert default_levels(own) == default_levels(own, wide=True) == expected


def test_a_range_of_formats_has_no_ends_that_could_be_crowded():
    candidates = make_candidates(environment([400, 400], EIGHT), None)
    assert [len(choices) for choices in candidates.choices] == [2, 2]
    assert crowded_ends(candidates, np.array([1, 1])) == []


@pytest.mark.parametrize(
    "controller", [KMeans(10), Linear(10), LGreCo(10, accordion=Accordion(EIGHT, FOUR, every_steps=10))]
)
def test_every_periodic_controller_has_this_range(controller):
    (choices,) = controller.candidate_levels(environment([640], own=EIGHT)).choices
    assert set(choices) == {EIGHT, FOUR}


def job(controller, own=EIGHT) -> Simulation:
    return Simulation(LAYERS, own, 2, controller=controller)


def drawn(step: int):
    """Every layer a thousand times as large as the one before it."""
    rng = np.random.default_rng(step)
    return [
        [(1000.0**k * rng.normal(size=layer.size)).astype(np.float32) for k, layer in enumerate(LAYERS)]
        for _ in range(2)
    ]


def go_on(ranks: Simulation) -> list[str]:
    """The compressors at the end."""
    for number in range(STEPS):
        ranks.step(drawn(number)).all_means()
    levels(ranks)
    return [a.compressor for a in ranks.pipelines[0].plan.assignments]


def test_layers_that_lose_little_take_four_bits(caplog):
    caplog.set_level(logging.INFO, "gradcomp")
    ranks = job(LGreCo(4))
    plan = go_on(ranks)
    assert plan[0] == FOUR.to_string()
    assert plan[-1] == EIGHT.to_string()
    agreed = ranks.pipelines[0].plan
    assert Plan.from_json(agreed.to_json()) == agreed
    assert "block_float(format=fp4_e2m1) x" in histogram(agreed)
    assert "block_float(format=fp8_e4m3) x" in histogram(agreed)
    assert "level of their range" not in caplog.text


def test_formats_beside_levels_of_another_family():
    controller = LGreCo(4, levels=[EIGHT, FOUR, Quantize(4)], alpha=1.0)
    assert controller_from_string(
        "lgreco:every_steps=4,levels=[block_float]/[block_float:format=fp4_e2m1]/[quantize:bits=4]"
    ) == LGreCo(4, levels=(EIGHT, FOUR, Quantize(4)))
    plan = go_on(job(controller))
    assert plan[-1] == EIGHT.to_string()
    assert plan[0] in (FOUR.to_string(), Quantize(4).family_string())


@pytest.mark.parametrize("own", [EIGHT, BlockFloat(rounding="nearest")], ids=["draws", "feedback"])
def test_a_resumed_run_has_the_same_formats(own):
    plans = set()

    def step(ranks, number):
        means, plan, _ = after_step(ranks, ranks.step(drawn(number)))
        plans.add(plan)
        return means, plan

    check_resumed(lambda: job(LGreCo(3), own), step, STEPS, (2, 5, 9))
    assert len(plans) > 1
