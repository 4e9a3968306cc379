"""Changes of plan: together, at one step, or not at all."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from gradcomp import Cast, ConfigError, Identity, LayerSpec, Plan, PlanMismatchError, Quantize, StateError
from gradcomp.exchange.pipeline import Resumption
from gradcomp.exchange.snapshot import inherit
from gradcomp.testing.simulation import Simulation, plan_for

LAYERS = [LayerSpec("a", (900,)), LayerSpec("b", (70,)), LayerSpec("c", (400,))]
RANDOM = {"shuffle": True, "delay": 0.4, "slice_elements": 300}
BEFORE = Quantize(4, 50, rounding="nearest")
AFTER = Quantize(2, 50, rounding="nearest")

proposal = partial(plan_for, LAYERS)


def versions(ranks: Simulation) -> list[int]:
    return [p.plan.version for p in ranks.pipelines]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("compressor", [AFTER, Identity(), Cast("bfloat16")])
def test_ranks_swap_at_the_step_after_the_last_one_is_ready(compressor, seed: int):
    ranks = Simulation(LAYERS, BEFORE, 3, seed=seed, **RANDOM)
    ready_at = [1, 4, 2]
    history = []
    for step in range(7):
        for pipeline, when in zip(ranks.pipelines, ready_at, strict=True):
            if step == when:
                pipeline.propose(proposal(compressor, 1))
        ranks.step().all_means()
        history.append(versions(ranks))
    assert history == [[0] * 3] * 4 + [[1] * 3] * 3


@pytest.mark.parametrize("seed", range(6))
def test_proposals_may_come_in_the_middle_of_a_step(seed: int):
    ranks = Simulation(LAYERS, BEFORE, 3, seed=seed, **RANDOM)
    turns = {r: 5 + 23 * r for r in range(3)}

    def propose() -> None:
        for r, pipeline in enumerate(ranks.pipelines):
            turns[r] -= 1
            if turns[r] == 0:
                pipeline.propose(proposal(AFTER, 1))

    for _ in range(4):
        ranks.step(during=propose).all_means()
        assert len(set(versions(ranks))) == 1
    assert versions(ranks) == [1] * 3


def test_several_plans_in_a_row():
    ranks = Simulation(LAYERS, BEFORE, 3, **RANDOM)
    for version in range(1, 6):
        for pipeline in ranks.pipelines:
            pipeline.propose(proposal(Quantize(version, 50), version))
        ranks.step().all_means()
        assert versions(ranks) == [version] * 3


def test_the_new_plan_decides_what_travels():
    ranks = Simulation(LAYERS, Quantize(8, 50), 2, reorder=False)
    sent = []
    for step in range(4):
        if step == 1:
            for pipeline in ranks.pipelines:
                pipeline.propose(proposal(Quantize(1, 50), 1))
        ranks.step()
        sent.append(ranks.pipelines[0].transport.bytes_sent)
    first, second, third, fourth = np.diff([0, *sent])
    assert second == first + 32  # the digest of the next plan
    assert third == fourth
    # Seven bits less per element.
    assert first - third >= 7 * sum(layer.size for layer in LAYERS) // 8 - 7 - 4 * 15


@pytest.mark.parametrize(
    "other",
    [proposal(Quantize(3, 50), 1), Plan(1, proposal(AFTER, 1).assignments[::-1])],
    ids=["level", "order"],
)
@pytest.mark.parametrize("kind", [BEFORE, Identity()], ids=["reduce", "sum"])
def test_another_plan_on_one_rank_is_a_mismatch_on_all(other: Plan, kind):
    ranks = Simulation(LAYERS, kind, 3, **RANDOM)
    for pipeline, plan in zip(ranks.pipelines, [proposal(AFTER, 1), other, proposal(AFTER, 1)], strict=True):
        pipeline.propose(plan)
    errors = ranks.attempt()
    assert [type(error) for error in errors] == [PlanMismatchError] * 3


def test_another_plan_from_the_start_is_a_mismatch():
    ranks = Simulation(LAYERS, Identity(), 2)
    ranks.pipelines[1].restore(Resumption(0, range(3), plan_for(LAYERS, Cast("float32"))))
    ranks.pipelines[0].restore(Resumption(0, range(3), plan_for(LAYERS, Cast("float32"), 1)))
    errors = ranks.attempt()
    assert [type(error) for error in errors] == [PlanMismatchError] * 2


def test_one_rank_alone_changes_nothing():
    ranks = Simulation(LAYERS, BEFORE, 3, **RANDOM)
    ranks.pipelines[0].propose(proposal(AFTER, 1))
    for _ in range(3):
        ranks.step().all_means()
    assert versions(ranks) == [0] * 3


@pytest.mark.parametrize("version", [0, 2])
def test_a_proposal_has_the_next_version(version: int):
    (pipeline,) = Simulation(LAYERS, BEFORE, 1).pipelines
    with pytest.raises(ConfigError, match="version 1"):
        pipeline.propose(proposal(AFTER, version))


def test_a_proposal_covers_the_layers():
    (pipeline,) = Simulation(LAYERS, BEFORE, 1).pipelines
    with pytest.raises(ConfigError, match="does not fit"):
        pipeline.propose(plan_for(LAYERS[1:], AFTER, 1))


def test_a_proposal_that_cannot_be_carried_out_is_refused_at_once():
    (pipeline,) = Simulation(LAYERS, BEFORE, 1).pipelines
    bad = Plan(1, tuple(type(a)(a.layer, a.compressor, 99) for a in proposal(AFTER).assignments))
    with pytest.raises(ConfigError, match="99"):
        pipeline.propose(bad)


# --- taking over from elsewhere -----------------------------------------------------------------------------


def test_restore_goes_on_from_there():
    ranks = Simulation(LAYERS, BEFORE, 2, slice_elements=300)
    ranks.step()
    for pipeline in ranks.pipelines:
        pipeline.propose(proposal(AFTER, 1))
        pipeline.restore(Resumption(10, [2, 0, 1], proposal(Identity(), 5), frozenset([1])))
    ranks.step().all_means()
    assert [(p.step, p.ordering.order, p.ordering.cold) for p in ranks.pipelines] == [
        (11, [2, 0, 1], frozenset([1]))
    ] * 2
    assert versions(ranks) == [5, 5]  # and the proposal for the plan before is forgotten


def test_restore_is_refused_while_a_step_is_under_way():
    (pipeline,) = Simulation(LAYERS, BEFORE, 1).pipelines
    pipeline.open()
    with pytest.raises(StateError):
        pipeline.restore(Resumption(0, [0, 1, 2], pipeline.plan))


@pytest.mark.parametrize("compressor", [BEFORE, Identity()], ids=["with feedback", "without"])
def test_more_layers_inherit_what_is_owed(compressor):
    old = Simulation(LAYERS, BEFORE, 3, slice_elements=300)
    for _ in range(3):
        old.step()
    owed = [old.owed(layer) for layer in range(len(LAYERS))]
    new = Simulation([LayerSpec("new", (50,)), *LAYERS[::-1]], compressor, 3, slice_elements=300)
    for mine, theirs in zip(new.pipelines, old.pipelines, strict=True):
        inherit(mine, theirs)
    for layer, before in enumerate(owed):
        np.testing.assert_allclose(new.owed(3 - layer), before, atol=1e-6)
    assert [p.step for p in new.pipelines] == [3] * 3
    new.step().all_means()
