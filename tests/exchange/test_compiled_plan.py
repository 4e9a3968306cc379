"""Layouts that are kept while plans go back and forth: they change nothing but the time that a swap takes."""

from __future__ import annotations

import hashlib
from types import SimpleNamespace

import numpy as np
import pytest

from gradcomp import LayerSpec, MomentumCorrection, Plan, PowerSGD, Quantize, TopK
from gradcomp.core.plan import Fingerprint, manifest
from gradcomp.exchange import compiled_plan
from gradcomp.testing.simulation import Simulation, plan_for, same_bytes, true_mean

LAYERS = [LayerSpec("a", (30, 30)), LayerSpec("b", (70,)), LayerSpec("c", (400,))]
#: With second residuals, with first ones only, with momentum, with a warm start.
PLANS = [
    Quantize(3, 50, rounding="nearest"),
    TopK(0.1),
    MomentumCorrection(Quantize(5, 20, feedback=True), 0.5),
    PowerSGD(2),
]
SETTINGS = {"slice_elements": 300, "cold_after_steps": 2}


def swap(ranks: Simulation, compressor) -> None:
    """As a controller does: on all ranks, between two steps."""
    for p in ranks.pipelines:
        p.plan = plan_for(LAYERS, compressor, p.plan.version + 1)
        p._stale = True


def back_and_forth(ranks: Simulation, steps: int = 24) -> list[bytes]:
    found = []
    for step in range(steps):
        gradients = ranks.gradients(absent=[1] if step % 8 in (3, 4, 5) else [])
        if step % 5 == 4:
            gradients[0][2][3] = np.inf
        found += [b"" if m is None else m.tobytes() for m in ranks.step(gradients).all_means()]
        swap(ranks, PLANS[(step // 2 + step) % len(PLANS)])
    return found


def test_means_and_state_are_those_of_layouts_made_anew(monkeypatch):
    made = []
    real = compiled_plan.PlanCompiler.compile
    monkeypatch.setattr(
        compiled_plan.PlanCompiler, "compile", lambda *given: made.append(given) or real(*given)
    )
    kept = Simulation(LAYERS, PLANS[0], 3, seed=1, shuffle=True, delay=0.2, **SETTINGS)
    means = back_and_forth(kept)
    used = len(made)
    monkeypatch.setattr(compiled_plan, "_MOST", 1)
    anew = Simulation(LAYERS, PLANS[0], 3, seed=1, shuffle=True, delay=0.2, **SETTINGS)
    assert back_and_forth(anew) == means
    assert anew.state() == kept.state()
    assert used < (len(made) - used) / 2


def test_nothing_is_lost_when_second_residuals_go_and_come_back():
    ranks = Simulation(LAYERS, PLANS[0], 3, reorder=False, **SETTINGS)
    missing = [np.zeros(layer.size) for layer in LAYERS]
    for step in range(12):
        gradients = ranks.gradients()
        for i, mean in enumerate(ranks.step(gradients).all_means()):
            missing[i] += true_mean(gradients, i) - mean
            np.testing.assert_allclose(missing[i], ranks.owed(i), atol=1e-4)
        assert any(p.residuals.second.nbytes for p in ranks.pipelines) == (step % 2 == 0)
        swap(ranks, PLANS[(step + 1) % 2])
    assert len(ranks.pipelines[0]._compiled_plans) == 2


def test_only_the_last_few_are_kept_and_those_in_force_of_late():
    kept = compiled_plan.CompiledPlans()

    def plan_of(key: object, step: int, new: str = "") -> str:
        return kept.get(key, step, lambda: SimpleNamespace(name=new)).name

    for key in range(20):
        assert plan_of(key, 0, f"{key}") == f"{key}"
    assert len(kept) == 8
    assert plan_of(12, 0) == "12"
    assert plan_of(11, 0, "new") == "new"
    plan_of("in force", 10, "last")
    kept.age(64)
    assert len(kept) == 8
    kept.age(65)
    assert len(kept) == 1
    assert plan_of("in force", 200) == "last"
    assert plan_of(11, 200, "made") == "made"


def test_a_pipeline_lets_go_of_its_old_layout():
    ranks = Simulation(LAYERS, PLANS[0], 2, reorder=False)
    swap(ranks, PLANS[1])
    for _ in range(64):
        ranks.step()
    assert [len(p._compiled_plans) for p in ranks.pipelines] == [2, 2]
    ranks.step()
    ranks.step()
    assert [len(p._compiled_plans) for p in ranks.pipelines] == [1, 1]


@pytest.mark.parametrize("version", [0, 7, 123456])
def test_the_digest_is_that_of_the_whole_text(version: int):
    plan = plan_for(LAYERS, PLANS[1], version)
    text = plan.to_json() + manifest(LAYERS)
    assert plan.digest(LAYERS) == hashlib.sha256(text.encode()).digest()
    fingerprint = Fingerprint(plan.assignments, LAYERS)
    assert fingerprint.digest(version + 1) != plan.digest(LAYERS)
    assert fingerprint.digest(version) == plan.digest(LAYERS)
    assert Plan.from_json(plan.to_json()) == plan


def test_plans_that_differ_in_a_level_have_layouts_of_their_own():
    ranks, direct = (Simulation(LAYERS, c, 2) for c in (TopK(0.1), TopK(0.2)))
    swap(ranks, TopK(0.2))
    assert same_bytes(ranks.step().mean(0), direct.step().mean(0))
