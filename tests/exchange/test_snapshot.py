"""State out of a pipeline and back in: nothing lost, nothing moved, over more layers and other numbers of ranks."""

from __future__ import annotations

import copy
import dataclasses
import json

import numpy as np
import pytest

from gradcomp import Cast, Config, Identity, LayerSpec, Plan, Quantize
from gradcomp.core.errors import StateError
from gradcomp.core.state import Range
from gradcomp.exchange.pipeline import Pipeline
from gradcomp.exchange.snapshot import Shared, check, inherit, merge, restore, snapshot
from gradcomp.testing.simulation import Simulation, plan_for, random_gradients
from gradcomp.transport.inprocess import World

LAYERS = [
    LayerSpec("w1", (37, 11)),
    LayerSpec("b1", (11,)),
    LayerSpec("unused", (9, 5)),
    LayerSpec("w2", (300,), "float16"),
    LayerSpec("w3", (6, 50), "bfloat16"),
    LayerSpec("scalar", ()),
    LayerSpec("nothing", (0, 4)),
]
KINDS = {
    "4 bits nearest": Quantize(4, 32, rounding="nearest"),
    "1 bit nearest": Quantize(1, 16, rounding="nearest"),
    "stochastic": Quantize(3, 33),
    "stochastic feedback": Quantize(2, 16, feedback=True),
    "bf16": Cast("bfloat16"),
    "bf16 feedback": Cast("bfloat16", feedback=True),
    "none": Identity(),
}
SMALL = {"slice_elements": 100, "cold_after_steps": 2}


def job(kind, world: int = 3, layers=LAYERS, **settings) -> Simulation:
    return Simulation(layers, kind, world, shuffle=True, **{**SMALL, **settings})


def gradients(step: int, world: int, layers=LAYERS):
    """Of one step; one layer is used in some steps only, so that it turns cold and comes back."""
    drawn = random_gradients(layers, world, seed=step)
    if step not in (0, 5, 9):
        for rank in drawn:
            rank[2] = None
    return drawn


def train(ranks: Simulation, first: int, steps: int) -> list[bytes]:
    """The bytes of all means."""
    means = []
    for step in range(first, first + steps):
        outcome = ranks.step(gradients(step, ranks.size, ranks.layers))
        means += [b"" if mean is None else mean.tobytes() for mean in outcome.all_means()]
    return means


def moved(old: Simulation, new: Simulation) -> Simulation:
    for theirs, mine in zip(old.pipelines, new.pipelines, strict=True):
        restore(mine, snapshot(theirs))
    return new


def propose(ranks: Simulation, compressor) -> Simulation:
    for pipeline in ranks.pipelines:
        pipeline.propose(plan_for(LAYERS, compressor, 1))
    return ranks


# ------------------------------------------------------------------------------------------- out and back in


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_restored_run_is_the_uninterrupted_one(kind):
    whole, expected, resumed = job(kind), [], {}
    for step in range(12):
        if step in (1, 2, 6):
            resumed[step] = moved(whole, job(kind))
        expected.append(train(whole, step, 1))
    for before, ranks in resumed.items():
        assert train(ranks, before, 12 - before) == [mean for means in expected[before:] for mean in means]
        assert ranks.state() == whole.state()
        assert [p.ordering.order for p in ranks.pipelines] == [p.ordering.order for p in whole.pipelines]


def test_a_snapshot_is_a_copy_and_changes_nothing():
    whole, watched = job(KINDS["4 bits nearest"]), job(KINDS["4 bits nearest"])
    expected = train(whole, 0, 8)
    means = []
    for step in range(8):
        means += train(watched, step, 1)
        (taken, *_) = map(snapshot, watched.pipelines)
        if step == 3:
            kept, copies = taken, copy.deepcopy((dict(taken.first), taken.second))
    assert means == expected
    assert watched.state() == whole.state()
    assert all(np.array_equal(kept.first[name], value) for name, value in copies[0].items())
    assert np.array_equal(kept.second, copies[1])


def test_an_earlier_state_replaces_a_later_one():
    ranks = job(KINDS["1 bit nearest"])
    train(ranks, 0, 3)
    taken = [snapshot(p) for p in ranks.pipelines]
    expected = train(ranks, 3, 4)
    for pipeline, state in zip(ranks.pipelines, taken, strict=True):
        restore(pipeline, state)
    assert train(ranks, 3, 4) == expected


def test_layers_may_be_registered_in_another_order():
    first, whole = job(KINDS["4 bits nearest"]), job(KINDS["4 bits nearest"])
    train(whole, 0, 6)
    train(first, 0, 3)
    second = moved(first, job(KINDS["4 bits nearest"], layers=LAYERS[::-1]))
    for step in range(3, 6):
        second.step([rank[::-1] for rank in gradients(step, 3)])
    for pair in zip(second.pipelines, whole.pipelines, strict=True):
        mine, theirs = (
            [p.residuals.first.value(layer).tobytes() for layer in range(len(LAYERS))] for p in pair
        )
        assert mine[::-1] == theirs


def test_a_plan_that_changed_is_kept():
    ranks = propose(job(KINDS["4 bits nearest"], 2), Quantize(2, 32, rounding="nearest"))
    train(ranks, 0, 3)
    new = moved(ranks, job(KINDS["4 bits nearest"], 2))
    assert [p.plan for p in new.pipelines] == [p.plan for p in ranks.pipelines]
    assert new.pipelines[0].plan.version == 1


def test_layers_that_get_feedback_with_the_next_step_are_no_missing_ones():
    ranks = propose(job(Identity(), 2), KINDS["4 bits nearest"])
    train(ranks, 0, 1)  # the plan takes over at the next step
    new = moved(ranks, job(Identity(), 2))
    assert train(new, 1, 2) == train(ranks, 1, 2)


def test_residuals_of_layers_without_feedback_now_are_kept():
    ranks = job(KINDS["4 bits nearest"], 2)
    train(ranks, 0, 2)
    train(propose(ranks, Identity()), 2, 2)
    owed = ranks.owed(0)
    assert owed.any()
    np.testing.assert_array_equal(moved(ranks, job(Identity(), 2)).owed(0), owed)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"slice_elements": 64}, "slice_elements is 64, was 100"),
        ({"reduction": "ring"}, "reduction is ring, was sra"),
    ],
    ids=["slices", "reduction"],
)
def test_another_setting_keeps_what_is_owed_and_warns(settings, text: str, caplog):
    ranks = job(KINDS["1 bit nearest"])
    train(ranks, 0, 4)
    new = moved(ranks, job(KINDS["1 bit nearest"], **settings))
    assert text in caplog.text
    for layer in range(len(LAYERS)):
        np.testing.assert_allclose(new.owed(layer), ranks.owed(layer), atol=1e-5)
    train(new, 4, 2)


def test_where_the_ranks_chose_the_size_of_buckets_the_saved_one_takes_over(caplog):
    ranks = job(KINDS["1 bit nearest"])
    train(ranks, 0, 4)
    new = job(KINDS["1 bit nearest"], slice_elements=64)
    for pipeline in new.pipelines:
        pipeline.slices_chosen = True
    moved(ranks, new)
    assert "differ" not in caplog.text
    assert [len(p.layout.buckets) for p in new.pipelines] == [len(p.layout.buckets) for p in ranks.pipelines]
    assert snapshot(new.pipelines[0]).shared.settings["slice_elements"] == 100
    assert train(new, 4, 3) == train(ranks, 4, 3)


def test_a_state_from_before_there_were_reductions_is_sra():
    plain = snapshot(single()).shared.to_plain()
    del plain["settings"]["reduction"]
    assert Shared.from_plain(plain).settings["reduction"] == "sra"


def test_another_compression_than_the_saved_one_is_said(caplog):
    ranks = job(KINDS["4 bits nearest"], 1)
    new = moved(ranks, job(Identity(), 1))
    assert "the saved plan takes over: 7 layers" in caplog.text
    assert new.pipelines[0].plan == ranks.pipelines[0].plan


def test_an_open_step_has_no_state():
    (pipeline,) = job(KINDS["4 bits nearest"], 1).pipelines
    taken = snapshot(pipeline)

    def refused() -> None:
        for call in (lambda: snapshot(pipeline), lambda: restore(pipeline, taken)):
            with pytest.raises(StateError, match="a step is open"):
                call()

    pipeline.open()
    refused()
    pipeline.arrivals.flush()
    while pipeline.is_open:
        pipeline.poll()
    refused()
    pipeline.commit()
    snapshot(pipeline)


# ------------------------------------------------------------------------------------------------ what does not fit


def single(layers=LAYERS, kind=KINDS["4 bits nearest"]) -> Pipeline:
    return Pipeline(
        layers, plan_for(layers, kind), World(1).transports()[0], Config(**SMALL), lambda layer: 0
    )


def test_one_error_lists_every_layer_that_does_not_fit():
    state = snapshot(single())
    others = [*LAYERS[2:], LayerSpec("w1", (11, 37)), LayerSpec("new", (3,)), LayerSpec("newer", (2, 2))]
    target = single(others)
    with pytest.raises(StateError) as caught:
        restore(target, state)
    for part in (
        "unknown layer 'b1'",
        "missing layer 'new'",
        "missing layer 'newer'",
        "misshapen layer 'w1'",
    ):
        assert part in str(caught.value)
    assert "w2" not in str(caught.value)
    assert target.step == 0


def _without(state, name):
    first = {n: value for n, value in state.first.items() if n != name}
    return dataclasses.replace(state, first=first, ranges=(), second=state.second[:0])


def _with(state, name, value):
    return dataclasses.replace(state, first={**state.first, name: value})


NAN = np.full((37, 11), np.nan, dtype=np.float32)
BROKEN = {
    "missing residual of 'w1'": lambda s: _without(s, "w1"),
    "which has no residual": lambda s: dataclasses.replace(s, first={}),
    "which is not one of the layers": lambda s: _with(s, "stranger", NAN),
    "'w1' has shape \\[407\\]": lambda s: _with(s, "w1", s.first["w1"].reshape(-1)),
    "dtype float64": lambda s: _with(s, "w1", s.first["w1"].astype(np.float64)),
    "'w1' is not finite": lambda s: _with(s, "w1", NAN),
    "server-side error is not finite": lambda s: dataclasses.replace(s, second=s.second * np.float32(np.nan)),
    "do not match their ranges": lambda s: dataclasses.replace(s, second=s.second[:-1]),
    "layer number 99": lambda s: dataclasses.replace(s, ranges=(*s.ranges, Range(99, 0, 0))),
    "of 'w1' from 400": lambda s: dataclasses.replace(s, ranges=(Range(0, 400, s.second.size),)),
    "of 'w1' from -3": lambda s: dataclasses.replace(s, ranges=(Range(0, -3, s.second.size),)),
    "of 'w1' from 5": lambda s: dataclasses.replace(s, ranges=(Range(0, 5, -2), *s.ranges), second=s.second[:-2]),
    "of 'w1' from 1, ": lambda s: dataclasses.replace(s, ranges=(Range(0, 0, 2), Range(0, 1, 2)), second=s.second[:4]),
    "rank 1 of 4 on rank 0 of 1": lambda s: dataclasses.replace(s, rank=1, world=4),
}  # fmt: skip


@pytest.mark.parametrize("message", BROKEN)
def test_a_state_that_does_not_fit_is_refused_whole(message: str):
    pipeline = single()
    state = snapshot(pipeline)
    with pytest.raises(StateError, match=message):
        check(pipeline, BROKEN[message](state))
    with pytest.raises(StateError, match=message):
        restore(pipeline, BROKEN[message](state))
    assert pipeline.step == 0
    restore(pipeline, state)


def test_the_shared_part_goes_through_json():
    ranks = job(KINDS["stochastic"], 2)
    train(ranks, 0, 4)
    shared = snapshot(ranks.pipelines[0]).shared
    assert Shared.from_plain(json.loads(json.dumps(shared.to_plain()))) == shared
    assert shared == snapshot(ranks.pipelines[1]).shared


NESTED: list = []
for _ in range(100_000):
    NESTED = [NESTED]
HOSTILE = {
    "step": [-1, 1.0, True, None, 2**63, "3"],
    "layers": [None, {}, [["w1"]], [["w1", [-1], "float32"]], [["w1", [2**60], "float32"]], [[1, [1], "float32"]],
               [["w1", [1], "complex64"]], [["w1", [1], "float32"]] * 2, [["w1", "11", "float32"]]],
    "order": [None, ["w1"], [1, 2, 3], "w1", NESTED],
    "plan": [None, "", "{}", '{"version":0,"assignments":[]}', '{"version":-1,"assignments":[]}', "[" * 100_000],
    "cold": [None, ["stranger"], [1], "w1"],
    "sparse": [None, ["stranger"], [[]]],
    "streaks": [None, {}, {"w1": 1.5}, []],
    "settings": [None, {}, {"seed": -1, "slice_elements": 1, "cold_after_steps": 1},
                 {"seed": 1, "slice_elements": 1, "cold_after_steps": 1, "reduction": "rung"},
                 {"seed": 1, "slice_elements": 1, "cold_after_steps": 1, "reduction": 1}],
    "unit": [None, 0, -1.0, float("nan"), float("inf"), "1", True, 10**400],
}  # fmt: skip


@pytest.mark.parametrize(
    ("key", "value"), [(key, value) for key, values in HOSTILE.items() for value in values]
)
def test_a_hostile_shared_part_is_a_state_error(key: str, value):
    plain = snapshot(single()).shared.to_plain()
    with pytest.raises(StateError, match="not a compression state"):
        Shared.from_plain({**plain, key: value})
    del plain[key]
    with pytest.raises(StateError, match="not a compression state"):
        Shared.from_plain(plain)


def test_a_controllers_state_that_is_no_mapping_is_a_state_error():
    plain = snapshot(single()).shared.to_plain()
    with pytest.raises(StateError, match="not a compression state"):
        Shared.from_plain({**plain, "control": {"controller": "lgreco", "state": [1]}})


# ------------------------------------------------------------------------------------- more layers, other numbers


@pytest.mark.parametrize("compressor", [KINDS["1 bit nearest"], Identity()], ids=["with feedback", "without"])
def test_more_layers_inherit_order_cold_layers_and_what_is_owed(compressor):
    old = job(KINDS["1 bit nearest"], 3)
    train(old, 0, 5)
    new = job(compressor, 3, layers=[LayerSpec("added", (70,)), *LAYERS[::-1]])
    before = [old.owed(layer) for layer in range(len(LAYERS))]
    for mine, theirs in zip(new.pipelines, old.pipelines, strict=True):
        inherit(mine, theirs)
        assert mine.ordering.order == [*(len(LAYERS) - layer for layer in theirs.ordering.order), 0]
        assert (theirs.ordering.cold, mine.ordering.cold) == ({2}, {len(LAYERS) - 2})
        assert mine.step == 5
    residuals = new.pipelines[0].residuals
    kept = any(residuals.second.value(row).any() for row in range(len(residuals.ranges)))
    assert kept == (compressor != Identity())
    for layer, owed in enumerate(before):
        np.testing.assert_allclose(new.owed(len(LAYERS) - layer), owed, atol=1e-6)
    train(new, 5, 3)


def test_a_plan_that_changed_is_inherited():
    old = job(KINDS["1 bit nearest"], 1)
    old.pipelines[0].propose(plan_for(LAYERS, Quantize(3, 16, rounding="nearest"), 1))
    train(old, 0, 2)
    (new,) = job(KINDS["1 bit nearest"], 1, layers=[LayerSpec("added", (70,)), *LAYERS]).pipelines
    inherit(new, old.pipelines[0])
    assert new.plan.version == 2
    assert [a.level for a in new.plan.assignments] == [1] + [3] * len(LAYERS)


def resized(old: Simulation, world: int) -> Simulation:
    new = job(KINDS["1 bit nearest"], world, layers=old.layers)
    for rank, pipeline in enumerate(new.pipelines):
        restore(pipeline, merge((snapshot(p) for p in old.pipelines), rank, world))
    return new


def test_any_number_of_ranks_keeps_the_mean_of_what_is_owed():
    ranks = job(KINDS["1 bit nearest"], 2)
    train(ranks, 0, 5)
    owed = [ranks.owed(layer) for layer in range(len(LAYERS))]
    assert owed[0].any()

    def places() -> set:
        return {(p.step, tuple(p.ordering.order), p.ordering.cold) for p in ranks.pipelines}

    before = places()
    for world in (3, 1, 2, 7, 2):
        ranks = resized(ranks, world)
        for layer, expected in enumerate(owed):
            np.testing.assert_allclose(ranks.owed(layer), expected, rtol=1e-6, atol=1e-12)
        assert places() == before
    assert not any(p.residuals.second.value(row).any() for p in ranks.pipelines for row in range(2))
    train(ranks, 5, 2)


def test_error_feedback_telescopes_over_a_change_of_ranks():
    """Sum of true means minus sum of applied means is the mean of what is owed."""
    layers = [LayerSpec("w", (211,))]
    ranks = job(KINDS["1 bit nearest"], 3, layers=layers)
    applied = true = np.zeros(211)
    for step in range(6):
        if step == 3:
            ranks = resized(ranks, 2)
        drawn = random_gradients(layers, ranks.size, seed=step)
        applied = applied + ranks.step(drawn).mean(0)
        true = true + np.mean([rank[0].astype(np.float64) for rank in drawn], axis=0)
    np.testing.assert_allclose(true - applied, ranks.owed(0), atol=1e-4)


def test_states_of_different_moments_are_not_merged():
    ranks = job(KINDS["1 bit nearest"], 2)
    early = [snapshot(p) for p in ranks.pipelines]
    train(ranks, 0, 1)
    late = [snapshot(p) for p in ranks.pipelines]
    for states in ([early[0], late[1]], [early[1], early[0]], [early[0], early[0]], []):
        with pytest.raises(StateError):
            merge(states, 0, 1)


def test_a_plan_for_other_layers_is_refused():
    state = snapshot(single())
    plan = Plan(0, tuple(dataclasses.replace(a, level=99) for a in state.shared.plan.assignments))
    with pytest.raises(StateError, match="cannot be carried out"):
        check(single(), dataclasses.replace(state, shared=dataclasses.replace(state.shared, plan=plan)))
