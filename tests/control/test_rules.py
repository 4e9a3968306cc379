"""The contract of every controller that decides from a step's or a period's gradients, or from a table.

Plans are equal on all ranks whatever takes how long, and runs resume bit for bit. A new controller is one row of
``CHANGING``.
"""

from __future__ import annotations

import importlib.util

import pytest
from control.golden_runs import drawn
from control.observed import seen_by
from control.resumed import after_step, check_resumed, without_times
from late import Late
from loudest import LAYERS as SMALL
from loudest import levels

from gradcomp import LayerSpec, PowerSGD, Quantize, TopK
from gradcomp.control.grouped import Bayes, KMeans, Linear
from gradcomp.control.lgreco import LGreCo
from gradcomp.control.registry import BUILT_IN
from gradcomp.control.schedule import FixedPlan, Schedule
from gradcomp.control.two_levels import Accordion, AdaQS
from gradcomp.testing.simulation import Simulation

LAYERS = [*SMALL, LayerSpec("f", (40, 50))]

#: Controllers that change levels while these runs last.
CHANGING = {
    "accordion": Accordion(8, 2, eta=3.0, every_steps=4),
    "adaqs": AdaQS(8, 1, factor=0.9, every_steps=4),
    "kmeans": KMeans(4, levels=[2, 4, 8], alpha=1e6),
    "lgreco": LGreCo(4, levels=[2, 4, 8], alpha=1.5),
    "linear": Linear(4, levels=[2, 4, 8], alpha=None),
    "linear_budget": Linear(4, levels=[2, 4, 8], alpha=3.0),
    "schedule": Schedule({3: 8, 9: {"a": 2}, 17: TopK(0.1)}),
}
if importlib.util.find_spec("optuna") is not None:
    CHANGING["bayes"] = Bayes(4, levels=[2, 3, 4, 8], alpha=3.0, trials=8)


#: Tested elsewhere: it never changes, or decides by times, whose tests bring clocks of their own, or begins anew.
ELSEWHERE = {"fixed_plan", "auto", "gravac", "what_if"}


def test_every_controller_is_held_to_the_contract():
    here = {kind.name for kind in BUILT_IN} - ELSEWHERE
    assert here - {"bayes"} <= {controller.name for controller in CHANGING.values()} <= here


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("name", CHANGING)
def test_plans_are_equal_in_every_step_whatever_takes_how_long(name, world):
    ranks = Simulation(
        LAYERS, Quantize(4, 32), world, shuffle=True, delay=0.3, slice_elements=500,
        controller=CHANGING[name], background=Late(world),
    )  # fmt: skip
    found = []
    for step in range(80):
        ranks.step(drawn(ranks, step, 15)).all_means()
        found.append(tuple(levels(ranks)))
        if step >= 40 and len(set(found)) > 1:
            break
    if world > 1 or name not in ("bayes", "lgreco"):  # alone, a rank sends nothing that it could save
        assert len(set(found)) >= 2
    assert all(plan[4] is None for plan in found)


@pytest.mark.parametrize("name", CHANGING)
def test_resumed_is_uninterrupted(name, monkeypatch):
    without_times(monkeypatch)

    def job():
        return Simulation(LAYERS, Quantize(4, 32, rounding="nearest"), 2, controller=CHANGING[name])

    source = job()
    gradients = [drawn(source, step, 15) for step in range(22)]
    whole = check_resumed(
        job, lambda ranks, n: after_step(ranks, ranks.step(gradients[n])), 22, (5, 6, 8, 11)
    )
    assert whole.pipelines[0].plan.version >= 1


@pytest.mark.parametrize("own", [PowerSGD(4), TopK(0.05)])
def test_ranks_and_densities_are_levels_too(own):
    some = [8, 4, 2] if isinstance(own, PowerSGD) else [0.1, 0.05, 0.01]
    for controller in (
        Accordion(some[0], some[-1], every_steps=3),
        AdaQS(some[0], some[-1], every_steps=3),
        KMeans(3, levels=some),
        Linear(3, levels=some),
    ):
        ranks = Simulation(LAYERS, own, 2, controller=controller)
        for step in range(10):
            ranks.step(drawn(ranks, step, 15)).all_means()
            chosen = [level for level in levels(ranks) if level is not None]
            assert chosen
            assert set(chosen) <= {own.level, *some}


def test_string_forms_tell_ranks_apart_that_were_given_different_things():
    controllers = [
        *CHANGING.values(),
        Accordion(8, 2, eta=0.4, every_steps=4),
        Accordion(8, 3, eta=3.0, every_steps=4),
        Accordion(Quantize(8), Quantize(2), eta=3.0, every_steps=4),
        AdaQS(8, 1, factor=0.8, every_steps=4),
        KMeans(4, levels=[2, 4, 8], alpha=2.0),
        KMeans(4, levels=[Quantize(2), Quantize(4)], alpha=1e6),
        Linear(4, levels=[2, 4]),
        Linear(4, levels=[2, 4, 8], alpha=1.0),
        FixedPlan({"*": 4}),
        FixedPlan({"*": 8}),
        *map(Schedule, ({0: 8}, {1: 8}, {0: 4}, {0: {"a": 8}}, {0: TopK(0.1)})),
    ]
    forms = {c.to_string() for c in controllers}
    assert len(forms) == len(controllers)


@pytest.mark.parametrize(
    ("rule", "about"),
    [
        (Accordion(8, 2, every_steps=3), {"current": [1, 0], "memory": [3.0, -1.0]}),
        (AdaQS(8, 2, every_steps=3), {"current": [2, 1], "memory": [9.0, 0.0]}),
        (LGreCo(3, levels=[2, 4, 8]), {"current": [2, 0]}),
    ],
    ids=["accordion", "adaqs", "lgreco"],
)
def test_layers_without_a_gradient_keep_their_choice_and_memory(rule, about):
    observed = seen_by(rule, [64, 64], [0.0, 0.0], **about)
    decision = rule.decide(observed)
    assert decision.choices.tolist() == about["current"]
    assert decision.memory.tolist() == observed.memory.tolist()
