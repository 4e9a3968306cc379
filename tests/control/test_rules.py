"""The contract of every controller that decides from a step's or a period's gradients, or from a table.

Plans are equal on all ranks whatever takes how long, and runs resume bit for bit. A new controller is one row of
``CHANGING``.
"""

from __future__ import annotations

import importlib.util
import json
from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
from late import Late
from loudest import LAYERS as SMALL
from loudest import levels

from gradcomp import LayerSpec, PowerSGD, Quantize, TopK
from gradcomp.control.bayes import Bayes
from gradcomp.control.grouped import KMeans, Linear
from gradcomp.control.lgreco import LGreCo
from gradcomp.control.periodic import PeriodicRun
from gradcomp.control.registry import BUILT_IN
from gradcomp.control.schedule import FixedPlan, Schedule
from gradcomp.control.two_levels import Accordion, AdaQS
from gradcomp.exchange.snapshot import restore, snapshot
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


#: Tested elsewhere: it never changes, or decides by times, whose tests bring clocks of their own.
ELSEWHERE = {"fixed_plan", "auto", "gravac"}


def test_every_controller_is_held_to_the_contract():
    here = {kind.name for kind in BUILT_IN} - ELSEWHERE
    assert here - {"bayes"} <= {controller.name for controller in CHANGING.values()} <= here


def drawn(ranks: Simulation, step: int):
    """Gradients whose norms, order and noise change now and then; the large layer is always quiet."""
    era = step // 15
    gradients = ranks.gradients(absent=[3] if step % 5 == 2 else [])
    for rank in gradients:
        for i, gradient in enumerate(rank):
            if gradient is not None and gradient.size:
                norm = 4.0 ** ((i + era) % 3) if i < 5 else 0.01 * 3 ** (era % 2)
                noise = gradient / np.linalg.norm(gradient.astype(np.float32))
                mean = (0.1 if era % 2 else 1.0) / np.sqrt(gradient.size)
                gradient[:] = (norm * (noise + mean)).astype(gradient.dtype)
    return gradients


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("name", CHANGING)
def test_plans_are_equal_in_every_step_whatever_takes_how_long(name, world):
    ranks = Simulation(
        LAYERS, Quantize(4, 32), world, shuffle=True, delay=0.3, slice_elements=500,
        controller=CHANGING[name], background=Late(world),
    )  # fmt: skip
    found = []
    for step in range(80):
        ranks.step(drawn(ranks, step)).all_means()
        found.append(tuple(levels(ranks)))
        if step >= 40 and len(set(found)) > 1:
            break
    if world > 1 or name not in ("bayes", "lgreco"):  # alone, a rank sends nothing that it could save
        assert len(set(found)) >= 2
    assert all(plan[4] is None for plan in found)


@pytest.mark.parametrize("name", CHANGING)
def test_resumed_is_uninterrupted(name, monkeypatch):
    finish = PeriodicRun.finish  # all but the clock
    monkeypatch.setattr(
        PeriodicRun, "finish", lambda running, step: finish(running, replace(step, wire=0 * step.wire))
    )

    def job():
        return Simulation(LAYERS, Quantize(4, 32, rounding="nearest"), 2, controller=CHANGING[name])

    def after(ranks, these):
        means = ranks.step(these).all_means()
        states = [json.dumps(p.controller.shared_state()) for p in ranks.pipelines]
        return [None if a is None else a.tobytes() for a in means], levels(ranks), states

    whole, expected, saved = job(), [], {}
    gradients = [drawn(whole, step) for step in range(22)]
    for step, these in enumerate(gradients):
        if step in (5, 6, 8, 11):
            saved[step] = deepcopy([snapshot(p) for p in whole.pipelines])
        expected.append(after(whole, these))
    assert whole.pipelines[0].plan.version >= 1
    for at, states in saved.items():
        resumed = job()
        for pipeline, state in zip(resumed.pipelines, states, strict=True):
            restore(pipeline, state)
        for step in range(at, len(gradients)):
            assert after(resumed, gradients[step]) == expected[step], f"saved before step {at}: step {step}"


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
            ranks.step(drawn(ranks, step)).all_means()
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
    ]
    forms = {c.to_string() for c in controllers}
    assert len(forms) == len(controllers)
