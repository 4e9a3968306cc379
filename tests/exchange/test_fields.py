"""What compressors keep beside residuals, in snapshots: out and in again, over other numbers of ranks, and refused."""

from __future__ import annotations

import copy
import dataclasses
from contextlib import nullcontext
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest

from gradcomp import Cast, ErrorFeedback, Identity, LayerSpec, MomentumCorrection, Quantize, TopK
from gradcomp.compress import registry
from gradcomp.compress.base import MOMENTUM
from gradcomp.core.errors import StateError
from gradcomp.exchange import checkpoint
from gradcomp.exchange.snapshot import Shared, check, inherit, merge, restore, snapshot
from gradcomp.testing.simulation import Simulation, plan_for, random_gradients

LAYERS = [
    LayerSpec("w", (13, 7)),
    LayerSpec("seldom", (30,), "float16"),
    LayerSpec("field/w", (20,)),  # a name like that of a tensor in a file
    LayerSpec("nothing", (0,)),
]


@dataclass(frozen=True)
class Anchor(Identity):
    """Exact, and keeps the last mean's number of positive values: the same on all ranks."""

    name: ClassVar[str] = "anchor"

    def fields(self, layer, seed):
        return {"anchor": (2, lambda old: np.full(2, seed + layer.size, np.float32))}

    def exchange(self, group, context):
        before = context.load("anchor", group.layers) if context.fields else None
        flags = yield from super().exchange(group, context)
        context.store("anchor", group.layers, before / np.float32(3) + np.float32(1))
        return flags


@pytest.fixture(autouse=True)
def _known(monkeypatch):
    known = {**registry.registered(), "anchor": Anchor}
    monkeypatch.setattr(registry, "registered", lambda: known)


KINDS = {
    "top": MomentumCorrection(TopK(0.1), 0.5),
    "quantised": MomentumCorrection(Quantize(2, 16, rounding="nearest"), 0.5),
    "anchor": Anchor(),
    "both": MomentumCorrection(ErrorFeedback(Anchor()), 0.5),
}
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def job(kind, world: int = 3, layers=LAYERS) -> Simulation:
    return Simulation(layers, kind, world, shuffle=True, slice_elements=40, cold_after_steps=2)


def train(ranks: Simulation, first: int, steps: int) -> list[bytes]:
    means = []
    for step in range(first, first + steps):
        drawn = random_gradients(ranks.layers, ranks.size, seed=step)
        if step not in (0, 5):
            for rank in drawn:
                rank[1] = None  # turns cold, and comes back
        outcome = ranks.step(drawn, commit=step != 2)
        means += [b"" if mean is None else mean.tobytes() for mean in outcome.all_means()]
    return means


def on_disk(folder, ranks: Simulation):
    """Every rank's state, written and read."""
    states = [snapshot(pipeline) for pipeline in ranks.pipelines]
    files = tuple(checkpoint.write_rank(folder, state) for state in states)
    checkpoint.write_manifest(folder, checkpoint.Manifest(states[0].shared, files))
    manifest = checkpoint.Manifest.from_text(checkpoint.read_manifest(folder))
    return [checkpoint.read_rank(folder, manifest, rank) for rank in range(ranks.size)]


@every_kind
@pytest.mark.parametrize("before", [1, 3, 6])
def test_a_restored_run_is_the_uninterrupted_one(kind, before: int, tmp_path):
    whole, first, second = (job(kind) for _ in range(3))
    expected = train(whole, 0, 8)
    means = train(first, 0, before)
    for pipeline, state in zip(second.pipelines, on_disk(tmp_path, first), strict=True):
        restore(pipeline, state)
    assert means + train(second, before, 8 - before) == expected
    assert second.state() == whole.state()


@every_kind
def test_fields_are_in_the_snapshot_as_copies(kind):
    ranks = job(kind)
    train(ranks, 0, 2)
    pipeline = ranks.pipelines[0]
    taken = snapshot(pipeline).fields
    kept = copy.deepcopy(taken)
    assert set(kept) == set(pipeline.fields.names)
    for field, values in kept.items():
        assert {name: value.size for name, value in values.items()} == {
            layer.name: (layer.size if field == MOMENTUM else 2)
            for layer in LAYERS
            if layer.size or field != MOMENTUM
        }
    train(ranks, 3, 2)
    for field, values in kept.items():
        for name, value in values.items():
            assert np.array_equal(taken[field][name], value)


@pytest.mark.parametrize("kind", [KINDS["quantised"], Cast("bfloat16", feedback=True)], ids=["codes", "cast"])
def test_residuals_and_momentum_are_converted_to_the_unit_at_hand(kind):
    (old,), (new,) = (job(kind, 1).pipelines for _ in range(2))

    def states(pipeline):
        return [
            pipeline.residuals.first,
            *([pipeline.fields[MOMENTUM]] if MOMENTUM in pipeline.fields.names else []),
        ]

    for state in states(old):
        state.set(0, np.full_like(state.value(0), 3.0))
    restore(new, snapshot(old, unit=4.0), unit=2.0)
    for state in states(new):
        assert state.value(0).size
        assert (state.value(0) == 6.0).all()


def test_fields_move_to_more_layers():
    old = job(KINDS["both"], 2)
    train(old, 0, 3)
    new = job(KINDS["both"], 2, [LayerSpec("added", (5,)), *LAYERS])
    for mine, theirs in zip(new.pipelines, old.pipelines, strict=True):
        inherit(mine, theirs)
        for field in (MOMENTUM, "anchor"):
            for layer in range(len(LAYERS)):
                assert np.array_equal(mine.fields[field].value(1 + layer), theirs.fields[field].value(layer))
        assert mine.fields[MOMENTUM].value(0).tolist() == [0.0] * 5
        assert mine.fields["anchor"].value(0).tolist() == [5.0] * 2
    train(new, 3, 2)


def test_a_field_that_the_plan_has_dropped_is_kept():
    ranks = job(KINDS["top"], 2)
    train(ranks, 0, 2)
    for pipeline in ranks.pipelines:
        pipeline.propose(plan_for(LAYERS, Identity(), 1))
    train(ranks, 2, 2)
    new = job(Identity(), 2)
    for mine, theirs in zip(new.pipelines, ranks.pipelines, strict=True):
        restore(mine, snapshot(theirs))
        assert mine.fields[MOMENTUM].value(0).any()
    assert train(new, 4, 2) == train(ranks, 4, 2)
    assert new.state() == ranks.state()


# --- another number of ranks --------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2, 5])
def test_momentum_is_averaged_and_what_is_the_same_everywhere_stays(world: int):
    old = job(KINDS["both"], 3)
    train(old, 0, 5)
    mean = np.mean([p.fields[MOMENTUM].value(0).astype(np.float64) for p in old.pipelines], axis=0)
    anchors = {p.fields["anchor"].value(0).tobytes() for p in old.pipelines}
    assert mean.any()
    assert len(anchors) == 1
    new = job(KINDS["both"], world)
    states = [snapshot(p) for p in old.pipelines]
    for rank, pipeline in enumerate(new.pipelines):
        restore(pipeline, merge(states, rank, world))
        assert np.array_equal(pipeline.fields[MOMENTUM].value(0), mean.astype(np.float32))
        assert pipeline.fields["anchor"].value(0).tobytes() in anchors
    train(new, 5, 2)


def without(state, field: str, name: str):
    fields = {
        k: {n: v for n, v in values.items() if (k, n) != (field, name)} for k, values in state.fields.items()
    }
    return dataclasses.replace(state, fields=fields)


def replaced(state, field: str, name: str, value):
    return dataclasses.replace(state, fields={**state.fields, field: {**state.fields[field], name: value}})


@pytest.mark.parametrize("rank", [0, 1])
def test_a_field_that_some_ranks_lack_or_have_of_another_size_is_not_averaged(rank: int):
    states = [snapshot(p) for p in job(KINDS["both"], 2).pipelines]
    lacking, misshapen = [*states], [*states]
    lacking[rank] = without(states[rank], MOMENTUM, "w")
    with pytest.raises(StateError, match="not all ranks have momentum of 'w'"):
        merge(lacking, 0, 1)
    misshapen[rank] = replaced(states[rank], "anchor", "w", np.zeros(3, np.float32))
    with pytest.raises(StateError, match="anchor of 'w' has another size on rank 1"):
        merge(misshapen, 0, 1)


# --- what does not fit --------------------------------------------------------------------------------------


def test_one_error_lists_every_field_that_is_missing_or_misshapen():
    (pipeline,) = job(KINDS["both"], 1).pipelines
    state = without(without(snapshot(pipeline), MOMENTUM, "w"), "anchor", "nothing")
    state = replaced(state, MOMENTUM, "seldom", np.zeros(29, np.float32))
    with pytest.raises(StateError) as caught:
        check(pipeline, state)
    for part in ("missing momentum of 'w'", "missing anchor of 'nothing'", "missing momentum of 'seldom'"):
        assert part in str(caught.value)
    assert "field/w" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stranger", np.zeros(3, np.float32)),
        ("w", np.zeros((13, 7), np.float32)),
        ("w", np.zeros(91, np.float64)),
        ("w", np.full(91, np.nan, np.float32)),
    ],
)
def test_an_impossible_field_is_refused_with_nothing_changed(name: str, value):
    (pipeline,) = job(KINDS["top"], 1).pipelines
    state = snapshot(pipeline)
    pipeline.fields[MOMENTUM].set(0, np.full_like(pipeline.fields[MOMENTUM].value(0), 5))
    with pytest.raises(StateError, match=f"momentum of '{name}'"):
        restore(pipeline, replaced(state, MOMENTUM, name, value))
    assert (pipeline.fields[MOMENTUM].value(0) == 5).all()


@pytest.mark.parametrize(
    ("kind", "error"),
    [(Quantize(2, 16, rounding="nearest"), None), (KINDS["quantised"], "missing momentum of 'w'")],
    ids=["without", "with"],
)
def test_states_from_before_there_were_fields_and_rates(kind, error):
    ranks = job(kind, 1)
    train(ranks, 0, 2)
    state = snapshot(ranks.pipelines[0])
    plain = state.shared.to_plain()
    del plain["rate"]
    old = dataclasses.replace(state, shared=Shared.from_plain(plain), fields={})
    (pipeline,) = job(kind, 1).pipelines
    with pytest.raises(StateError, match=error) if error else nullcontext():
        restore(pipeline, old)
    assert pipeline.step == (0 if error else 2)
