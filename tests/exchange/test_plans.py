"""Changes of plan: together, at one step, or not at all."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from loudest import Loudest

from gradcomp import (
    Assignment,
    Cast,
    ConfigError,
    Identity,
    LayerSpec,
    Plan,
    PlanMismatchError,
    Quantize,
    StateError,
    TopK,
)
from gradcomp.compress import policy
from gradcomp.exchange.layout import compressors_of
from gradcomp.testing.simulation import Simulation, plan_for

LAYERS = [LayerSpec("a", (900,)), LayerSpec("b", (70,)), LayerSpec("c", (400,))]
RANDOM = {"shuffle": True, "delay": 0.4, "slice_elements": 300}
BEFORE = Quantize(4, 50, rounding="nearest")
AFTER = Quantize(2, 50, rounding="nearest")

proposal = partial(plan_for, LAYERS)


def versions(ranks: Simulation) -> list[int]:
    return [p.plan.version for p in ranks.pipelines]


@pytest.mark.parametrize("seed", range(2))
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


@pytest.mark.parametrize("seed", range(4))
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


def test_several_plans_in_a_row_and_none_for_one_rank_alone():
    ranks = Simulation(LAYERS, BEFORE, 3, **RANDOM)
    for version in range(1, 6):
        for pipeline in ranks.pipelines:
            pipeline.propose(proposal(Quantize(version, 50), version))
        ranks.step().all_means()
        assert versions(ranks) == [version] * 3
    ranks.pipelines[0].propose(proposal(AFTER, 6))
    for _ in range(3):
        ranks.step().all_means()
    assert versions(ranks) == [5] * 3


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
    ranks.pipelines[1].restore(0, plan_for(LAYERS, Cast("float32")), range(3))
    ranks.pipelines[0].restore(0, plan_for(LAYERS, Cast("float32"), 1), range(3))
    errors = ranks.attempt()
    assert [type(error) for error in errors] == [PlanMismatchError] * 2


def test_compressors_that_are_known_are_not_parsed(monkeypatch):
    monkeypatch.setattr(policy, "at_level", None)
    ranks = Simulation(LAYERS, BEFORE, 2, controller=Loudest(2), slice_elements=300)
    for _ in range(50):
        ranks.step()
    assert ranks.pipelines[0].plan.version
    for pipeline in ranks.pipelines:
        pipeline.set_compression(proposal(Identity()), {})
    for _ in range(4):
        ranks.step().all_means()
    assert ranks.pipelines[0].laid_out_plan.assignments == proposal(Identity()).assignments


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        (proposal(AFTER, 0), "version 1"),
        (proposal(AFTER, 2), "version 1"),
        (plan_for(LAYERS[1:], AFTER, 1), "does not fit"),
        (Plan(1, tuple(Assignment(a.layer, a.compressor, 99) for a in proposal(AFTER).assignments)), "99"),
    ],
)
def test_a_proposal_that_cannot_follow_is_refused_at_once(plan: Plan, text: str):
    (pipeline,) = Simulation(LAYERS, BEFORE, 1).pipelines
    with pytest.raises(ConfigError, match=text):
        pipeline.propose(plan)


# --- taking over from elsewhere -----------------------------------------------------------------------------


def test_restore_goes_on_from_there_between_steps_only():
    ranks = Simulation(LAYERS, BEFORE, 2, slice_elements=300)
    ranks.step()
    for pipeline in ranks.pipelines:
        pipeline.propose(proposal(AFTER, 1))
        pipeline.restore(10, proposal(Identity(), 5), [2, 0, 1], cold=frozenset([1]))
    ranks.step().all_means()
    assert [(p.step, p.ordering.order, p.ordering.cold) for p in ranks.pipelines] == [
        (11, [2, 0, 1], frozenset([1]))
    ] * 2
    assert versions(ranks) == [5, 5]  # and the proposal for the plan before is forgotten
    (pipeline, _) = ranks.pipelines
    pipeline.open()
    with pytest.raises(StateError):
        pipeline.restore(0, pipeline.plan, [0, 1, 2])


def test_a_compressor_that_is_not_registered_is_refused():
    class Mine(Identity):
        name = "mine"

    with pytest.raises(ConfigError, match="unknown compression 'mine'"):
        compressors_of(LAYERS, plan_for(LAYERS, Mine()))


def test_a_compressor_under_the_name_of_its_base_is_what_a_resumed_run_makes_of_its_text():
    class Mine(TopK):
        """It registers no name of its own."""

    layer = LayerSpec("weight", (30, 20))
    assert [type(each) for each in compressors_of([layer], plan_for([layer], Mine(0.1)))] == [TopK]
