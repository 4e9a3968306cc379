"""``set_compression`` in mid-run: what was held back is sent once, and all ranks go over together or fail together."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from late import Late
from loudest import Loudest
from tiers import every_value

from gradcomp import (
    DGC,
    Cast,
    Identity,
    LayerSpec,
    PlanMismatchError,
    Policy,
    PowerSGD,
    Quantize,
    Signum,
    StateError,
    TopK,
    Warmup,
)
from gradcomp.control.base import at_once
from gradcomp.core.topology import Topology
from gradcomp.exchange.snapshot import Shared, inherit, merge, restore, snapshot
from gradcomp.testing.simulation import Simulation, plan_for, true_mean

LAYERS = [
    LayerSpec("a", (30, 30)),
    LayerSpec("b", (70,)),
    LayerSpec("c", (40, 10), "float16"),
    LayerSpec("d", (90,), "bfloat16"),
    LayerSpec("e", (9,), "float64"),
]
NEAREST = Quantize(2, 64, rounding="nearest")
RANDOM = {"shuffle": True, "delay": 0.2, "slice_elements": 300}


def go_over(ranks: Simulation, compressor, later=(), who=None) -> None:
    target = plan_for(LAYERS, compressor)
    for pipeline in ranks.pipelines if who is None else [ranks.pipelines[r] for r in who]:
        pipeline.set_compression(target, dict(later))


def compressors(ranks: Simulation) -> set[str]:
    (plan,) = {p.laid_out_plan for p in ranks.pipelines}
    return {a.compressor for a in plan.assignments}


class Account:
    """True minus applied means, summed over steps."""

    def __init__(self, ranks: Simulation) -> None:
        self.ranks = ranks
        self.missing = [np.zeros(layer.size) for layer in LAYERS]

    def step(self, absent=(), size=1.0, **arguments) -> list:
        gradients = self.ranks.gradients(absent)
        gradients = [[None if g is None else (g * size).astype(g.dtype) for g in rank] for rank in gradients]
        outcome = self.ranks.step(gradients, **arguments)
        means = outcome.all_means()
        if all(outcome.committed):
            for layer, mean in enumerate(means):
                if mean is not None:
                    self.missing[layer] += true_mean(gradients, layer) - mean.astype(np.float64)
        return means

    def check(self, *, nothing_owed: bool) -> None:
        for layer, missing in enumerate(self.missing):
            owed = self.ranks.owed(layer)
            # What half-precision outputs round away is nobody's.
            bound = {"float32": 1e-4, "float64": 1e-12}.get(LAYERS[layer].dtype, 0.1)
            np.testing.assert_allclose(missing, owed, atol=bound)
            if nothing_owed:
                assert not owed.any()


@pytest.mark.parametrize(
    "reduction", ["sra", "ring", "tree", "gather", "all_to_all", "parameter_server", "hierarchical"]
)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_what_was_held_back_is_sent_once(world, reduction):
    settings = {"reduction": reduction, "topology": Topology(tuple((r + 1) // 2 for r in range(world)))}
    ranks = Simulation(LAYERS, NEAREST, world, **settings, **RANDOM)
    account = Account(ranks)
    for _ in range(5):
        account.step()
    account.check(nothing_owed=False)
    assert any(ranks.owed(layer).any() for layer in range(4))
    go_over(ranks, Identity())
    account.step()  # as before: its headers say that all ranks asked
    account.step()  # exact, with what was held back
    account.check(nothing_owed=True)
    account.step()
    assert compressors(ranks) == {"error_feedback[none]:decay=1.0,follow_rate=false", "none"}
    exact = Simulation(LAYERS, Identity(), world, slice_elements=300, **settings)
    for _ in range(2):
        gradients = ranks.gradients()
        assert [m.tobytes() for m in ranks.step(gradients).all_means()] == [
            m.tobytes() for m in exact.step(gradients).all_means()
        ]
    assert compressors(ranks) == {"none"}


@pytest.mark.parametrize(
    "before", [TopK(0.05), PowerSGD(1), DGC(0.05), Quantize(2, 64), Signum()], ids=lambda c: c.name
)
@pytest.mark.parametrize("after", [Identity(), Cast("bfloat16"), Signum()], ids=lambda c: c.name)
def test_from_any_compressor(before, after):
    ranks = Simulation(LAYERS, before, 3, **RANDOM)
    account = Account(ranks)
    for _ in range(4):
        account.step()
    go_over(ranks, after)
    account.step()
    if before.traits.keeps_residual and not before.traits.momentum:
        account.check(nothing_owed=False)
    account.step()
    assert not any(ranks.owed(layer).any() for layer in range(len(LAYERS)))
    for _ in range(2):
        account.step()
    wanted = plan_for(LAYERS, after).assignments
    assert [p.laid_out_plan.assignments for p in ranks.pipelines] == [wanted] * 3


def test_a_compressor_with_feedback_takes_the_residual_over():
    ranks = Simulation(LAYERS, TopK(0.05), 2, **RANDOM)
    account = Account(ranks)
    account.step()
    go_over(ranks, NEAREST)
    account.step()
    for _ in range(3):
        account.step()
        account.check(nothing_owed=False)
    assert len(compressors(ranks)) == 2  # and none of float64
    assert {p.plan.version for p in ranks.pipelines} == {1}


def test_momentum_of_the_old_compression_is_dropped():
    ranks = Simulation(LAYERS, DGC(0.05), 2)
    ranks.step()
    go_over(ranks, Identity())
    for _ in range(4):
        ranks.step()
    go_over(ranks, DGC(0.05))
    ranks.step()
    for pipeline in ranks.pipelines:
        pipeline.lay_out()
        assert not pipeline.fields["momentum"].value(0).any()
    ranks.step()
    assert ranks.pipelines[0].fields["momentum"].value(0).any()


def test_steps_that_are_refused_or_lack_a_layer_send_it_later():
    ranks = Simulation(LAYERS, NEAREST, 3, cold_after_steps=2, **RANDOM)
    account = Account(ranks)
    for _ in range(3):
        account.step()
    go_over(ranks, Identity())
    account.step()
    account.step(size=np.nan)
    account.step(commit=False)
    assert ranks.owed(0).any()
    account.step(absent=[1])
    assert not ranks.owed(0).any()
    assert ranks.owed(1).any()
    for _ in range(3):  # the layer goes cold: nobody waits for it any more
        account.step(absent=[1])
    rows = ranks.pipelines[0].laid_out_plan.by_layer
    assert [rows[name].compressor for name in ("a", "c", "d", "e")] == ["none"] * 4
    assert rows["b"].compressor.startswith("error_feedback[none]")
    for _ in range(3):
        account.step()
    account.check(nothing_owed=True)
    assert compressors(ranks) == {"none"}
    assert ranks.pipelines[0].plans.switch is None


def test_the_scale_of_the_loss_does_not_matter():
    ranks = Simulation(LAYERS, NEAREST, 2, **RANDOM)
    plain = Simulation(LAYERS, NEAREST, 2, **RANDOM)
    for step in range(6):
        if step == 2:
            go_over(ranks, Identity())
            go_over(plain, Identity())
        gradients = ranks.gradients()
        scaled = [[(8 * g).astype(g.dtype) for g in rank] for rank in gradients]
        for mean, eightfold in zip(
            plain.step(gradients).all_means(), ranks.step(scaled, scale=8.0).all_means(), strict=True
        ):
            np.testing.assert_array_equal(8 * mean.astype(np.float64), eightfold.astype(np.float64))


@pytest.mark.parametrize("late", [False, True])
def test_a_controller_ends(late):
    background = Late(1) if late else at_once
    ranks = Simulation(LAYERS, NEAREST, 3, controller=Loudest(3), background=background, slice_elements=50)
    account = Account(ranks)
    while not ranks.pipelines[0].plan.version:
        account.step()
    go_over(ranks, Identity())
    for _ in range(4):
        account.step()
    account.check(nothing_owed=True)
    version = ranks.pipelines[0].plan.version
    for _ in range(6):
        account.step()
    assert [p.controller for p in ranks.pipelines] == [None] * 3
    assert {p.plan.version for p in ranks.pipelines} == {version}
    assert compressors(ranks) == {"none"}


@pytest.mark.parametrize(("who", "at"), every_value(product([(0,), (2,), (0, 1)], range(2, 9))))
def test_a_rank_that_did_not_ask_is_not_left_behind_in_silence(who, at):
    # In any phase of a controller, whose votes these are not.
    ranks = Simulation(LAYERS, NEAREST, 3, controller=Loudest(3), slice_elements=50)
    for _ in range(at):
        ranks.step()
    go_over(ranks, Identity(), who=who)
    errors = ranks.attempt()
    assert all(isinstance(errors[r], PlanMismatchError) for r in who)
    assert all("set_compression()" in str(errors[r]) for r in who)


@pytest.mark.parametrize(
    ("world", "other", "later"),
    [(2, Cast("bfloat16"), ()), (3, Cast("bfloat16"), ()), (3, TopK(0.1), ()), (2, Identity(), (8, 9))],
    ids=["two", "three", "of another family", "what comes later"],
)
def test_other_arguments_are_a_mismatch_on_every_rank(world, other, later):
    ranks = Simulation(LAYERS, NEAREST, world, **RANDOM)
    ranks.step()
    go_over(ranks, Identity(), {step: plan_for(LAYERS, NEAREST) for step in later[:1]}, who=range(1, world))
    go_over(ranks, other, {step: plan_for(LAYERS, NEAREST) for step in later[1:]}, who=[0])
    assert [type(error) for error in ranks.attempt()] == [PlanMismatchError] * world


def test_a_schedule_gives_way_to_the_new_one():
    ranks = Simulation(LAYERS, Warmup(NEAREST, 4), 2, **RANDOM)
    ranks.step()
    go_over(ranks, Identity(), {7: plan_for(LAYERS, NEAREST), 8: plan_for(LAYERS, TopK(0.1))})
    names = []
    for _ in range(9):
        names.append({name.partition(":")[0] for name in compressors(ranks)} - {"none"})
        ranks.step()
    assert names == [set()] * 7 + [{"quantize"}, {"topk"}]


@pytest.mark.parametrize("at", range(4))
def test_it_goes_through_a_checkpoint(at):
    whole, first, second = (Simulation(LAYERS, NEAREST, 3, slice_elements=300) for _ in range(3))
    drawn = [whole.gradients() for _ in range(7)]
    for ranks in (whole, first):
        for step in range(2):
            ranks.step(drawn[step])
        go_over(ranks, Identity())
    for step in range(2, 2 + at):
        first.step(drawn[step])
    for pipeline, saved in zip(second.pipelines, first.pipelines, strict=True):
        state = snapshot(saved)
        restore(pipeline, replace(state, shared=Shared.from_plain(state.shared.to_plain())))
    for step in range(2, 7):
        expected = whole.step(drawn[step])
        if step >= 2 + at:
            found = second.step(drawn[step]).all_means()
            assert [m.tobytes() for m in found] == [m.tobytes() for m in expected.all_means()]
            assert {p.plan for p in second.pipelines} == {p.plan for p in whole.pipelines}
    assert compressors(second) == {"none"}


def test_more_layers_and_other_ranks_take_it_over():
    old = Simulation(LAYERS, NEAREST, 3)
    for _ in range(2):
        old.step()
    go_over(old, Identity())
    owed = old.owed(0)
    wider = [*LAYERS, LayerSpec("new", (20,))]
    new = Simulation(wider, Policy(Identity()).plan(wider), 3)
    for mine, theirs in zip(new.pipelines, old.pipelines, strict=True):
        inherit(mine, theirs)
    other = Simulation(LAYERS, NEAREST, 2)
    for rank, pipeline in enumerate(other.pipelines):
        restore(pipeline, merge([snapshot(p) for p in old.pipelines], rank, 2))
    for ranks in (new, other):
        np.testing.assert_allclose(ranks.owed(0), owed, atol=1e-5)
        for _ in range(4):
            ranks.step()
        assert not ranks.owed(0).any()
        assert compressors(ranks) == {"none"}


def test_a_state_that_is_none_and_an_open_step_are_refused():
    ranks = Simulation(LAYERS, NEAREST, 1)
    go_over(ranks, Identity())
    plain = snapshot(ranks.pipelines[0]).shared.to_plain()
    for bad in (3, {}, {**plain["switch"], "owing": ["x"]}, {**plain["switch"], "target": "{}"}):
        with pytest.raises(StateError, match="not a compression state"):
            Shared.from_plain({**plain, "switch": bad})
    ranks.pipelines[0].open()
    with pytest.raises(StateError, match="between steps"):
        go_over(ranks, Identity())
