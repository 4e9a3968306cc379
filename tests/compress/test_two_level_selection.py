"""Tests selection at two densities in one step: what is selected, sent, kept and observed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from compress.selecting import largest, select

import gradcomp as gc
from gradcomp.compress import TwoLevelSelection
from gradcomp.compress.base import MOMENTUM
from gradcomp.compress.sparse.two_level_selection import (
    GRADIENT,
    KEPT,
    KEPT_BY_CANDIDATE,
    TOTAL,
    select_twice,
)
from gradcomp.kernels.step import Observations
from gradcomp.testing.simulation import Simulation, plan_for, same_bytes

LAYERS = [
    gc.LayerSpec("a", (40, 13)),
    gc.LayerSpec("none", (0,)),
    gc.LayerSpec("half", (300,), "float16"),
    gc.LayerSpec("brain", (60,), "bfloat16"),
    gc.LayerSpec("one", (1,)),
]
INNER = [gc.TopK(0.2), gc.DGC(0.2, momentum_factor=0.0, sample=0.5), gc.RedSync(0.2), gc.SIDCo(0.2)]
DRAWN = [gc.RandomK(0.2), gc.RandomBlock(0.2)]
by_send = pytest.mark.parametrize("send", ["candidate", "minimum", "dense"])
by_name = pytest.mark.parametrize("inner", INNER, ids=lambda c: c.name)


def watched(ranks: Simulation) -> list[Observations]:
    """Returns every rank's observations, which its compressors fill in the next step."""
    found = []
    for pipeline in ranks.pipelines:
        seen = Observations(len(ranks.layers))
        steering = pipeline.plans

        def noting(*arguments, steering=steering, seen=seen, open_=steering.open):
            open_(*arguments)
            steering.observations = seen

        steering.open = noting
        found.append(seen)
    return found


def p_of(ranks: Simulation, gradients, rank: int, layer: int) -> np.ndarray:
    e = ranks.pipelines[rank].residuals.first.value(layer)
    return gradients[rank][layer].astype(np.float32) + e


SAME = {
    "candidate": (gc.TopK(0.03), TwoLevelSelection(gc.TopK(0.2), 0.03)),
    "candidate, coded": (
        gc.TopK(0.03, values=gc.Quantize(4, 32)),
        TwoLevelSelection(gc.TopK(0.2, values=gc.Quantize(4, 32)), 0.03),
    ),
    "candidate beyond the density": (gc.TopK(0.05), TwoLevelSelection(gc.TopK(0.05), 0.5)),
    **{
        f"minimum of {inner.name}": (inner, TwoLevelSelection(inner, 0.03, "minimum"))
        for inner in INNER + DRAWN
    },
    "candidate beyond a draw": (gc.RandomK(0.05), TwoLevelSelection(gc.RandomK(0.05), 0.5)),
}


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize(("one", "two"), SAME.values(), ids=SAME)
def test_what_is_sent_is_what_another_compressor_selects(world: int, one, two):
    """The candidate within an exact top-k is an exact top-k. The minimum is what the inner compressor sends."""
    direct, twice = (Simulation(LAYERS, c, world, shuffle=True, delay=0.3) for c in (one, two))
    for _ in range(5):
        gradients = direct.gradients()
        for rank in gradients:
            rank[0][::3] = np.round(rank[0][::3])  # ties
        want, got = direct.step(gradients).all_means(), twice.step(gradients).all_means()
        assert all(map(same_bytes, got, want))
        assert twice.state() == direct.state()


@by_name
@by_send
def test_what_is_noted_are_squared_norms_without_loss_scale(inner, send: str):
    compressor = TwoLevelSelection(inner, 0.03, send)
    ranks = Simulation(LAYERS, compressor, 2)
    for _ in range(3):
        gradients, seen = ranks.gradients(), watched(ranks)
        step = ranks.pipelines[0].step
        p = [[p_of(ranks, gradients, r, i) for i in range(len(LAYERS))] for r in range(2)]
        ranks.step([[g * g.dtype.type(4) for g in rank] for rank in gradients], scale=4.0)
        for rank in range(2):
            for i, spec in enumerate(LAYERS):
                c = p[rank][i]
                chosen = np.array(select(inner, c, step=step).indices[0], dtype=np.int64)
                k = min(max(round(0.03 * spec.size), 1), len(chosen))
                noted = {
                    GRADIENT: gradients[rank][i],
                    TOTAL: c,
                    KEPT: c[chosen],
                    KEPT_BY_CANDIDATE: c[chosen][largest(c[chosen], k)],
                }
                for name, part in noted.items():
                    expected = np.square(part.astype(np.float64)).sum()
                    assert seen[rank].of(name)[i] == pytest.approx(expected, rel=1e-12, abs=0)


@by_name
def test_the_candidate_is_the_largest_of_what_was_selected(inner):
    spec = [gc.LayerSpec("w", (500,))]
    ranks = Simulation(spec, TwoLevelSelection(inner, 0.03), 1)
    for step in range(4):
        gradients = ranks.gradients()
        p = p_of(ranks, gradients, 0, 0)
        mean = ranks.step(gradients).mean(0)
        sent = np.flatnonzero(mean)
        assert len(sent) == 15
        assert set(sent) <= set(select(inner, p, step=step).indices[0])
        np.testing.assert_array_equal(sent, largest(p, 15))
        assert mean[sent].tobytes() == p[sent].tobytes()
        left = np.where(mean != 0, 0, p)
        assert ranks.pipelines[0].residuals.first.value(0).tobytes() == left.tobytes()


@pytest.mark.parametrize("inner", DRAWN, ids=lambda c: c.name)
def test_the_candidate_of_a_draw_is_a_draw_within_it(inner):
    """Every element is sent in k of n steps, also those that the first draw finds by the first of its numbers."""
    spec, steps = [gc.LayerSpec("w", (60,))], 300
    ones = [[np.ones(60, np.float32)] for _ in range(2)]
    inner, counts = replace(inner, feedback=False), np.zeros(60)
    twice, once = (Simulation(spec, c, 2) for c in (TwoLevelSelection(inner, 0.1), inner))
    seen = watched(twice)
    for _ in range(steps):
        sent = twice.step(ones).mean(0) != 0
        assert sent.sum() == 6
        assert not (sent & (once.step(ones).mean(0) == 0)).any()
        counts += sent
    for rank in seen:
        noted = [rank.of(name)[0] for name in (TOTAL, KEPT, KEPT_BY_CANDIDATE)]
        assert noted == [60 * steps, 12 * steps, 6 * steps]
    assert np.abs(counts - steps / 10).max() < 25, "5 standard errors"


def test_values_that_are_weighted_are_refused():
    with pytest.raises(gc.ConfigError, match=r"sends values as they are, got random_k.*scaled=true"):
        TwoLevelSelection(gc.RandomK(0.1, scaled=True))


def test_fewer_than_the_candidate_wants_may_be_selected():
    # The sample sees even elements only, and its threshold lets half of what is wanted through.
    gradient = np.full(500, 1e-3, np.float32)
    gradient[::2] = 1 + np.arange(250)
    inner = gc.DGC(0.2, momentum_factor=0.0, sample=0.5)
    few, all_of_them = (
        Simulation([gc.LayerSpec("w", (500,))], c, 2) for c in (TwoLevelSelection(inner, 0.18), inner)
    )
    seen = watched(few)
    mean = few.step([[gradient], [gradient]]).mean(0)
    assert np.count_nonzero(mean) == 50
    assert same_bytes(mean, all_of_them.step([[gradient], [gradient]]).mean(0))
    assert seen[0].of(KEPT_BY_CANDIDATE)[0] == seen[0].of(KEPT)[0] > 0


@pytest.mark.parametrize("world", [1, 2, 3, 7])
def test_dense_is_the_allreduce_of_gradients_and_residuals(world: int):
    layers = [gc.LayerSpec("a", (40, 13)), gc.LayerSpec("b", (77,))]
    ranks, plain = (
        Simulation(layers, TwoLevelSelection(gc.TopK(0.1), 0.02), world),
        Simulation(layers, gc.Identity(), world),
    )
    ranks.step()
    for pipeline in ranks.pipelines:
        pipeline.propose(plan_for(layers, TwoLevelSelection(gc.TopK(0.1), 0.02, "dense"), 1))
    ranks.step()
    gradients = ranks.gradients()
    p = [[p_of(ranks, gradients, r, i) for i in range(2)] for r in range(world)]
    assert not np.array_equal(p[0][0], gradients[0][0])
    assert all(map(same_bytes, ranks.step(gradients).all_means(), plain.step(p).all_means()))
    assert not any(ranks.owed(i).any() for i in range(2))


@by_send
def test_momentum_starts_again_where_it_was_sent(send: str):
    spec = [gc.LayerSpec("w", (200,))]
    ranks = Simulation(spec, TwoLevelSelection(gc.DGC(0.1, momentum_factor=0.5, sample=1.0), 0.02, send), 1)
    gradients = ranks.gradients()
    mean = ranks.step(gradients).mean(0)
    momentum = ranks.pipelines[0].fields[MOMENTUM].value(0)
    assert np.count_nonzero(mean) == {"candidate": 4, "minimum": 20, "dense": 200}[send]
    assert momentum.tolist() == np.where(mean != 0, 0, gradients[0][0]).tolist()


def test_without_the_mask_a_dense_step_is_one_of_momentum():
    spec = [gc.LayerSpec("w", (50,))]
    plain = Simulation(spec, gc.MomentumCorrection(gc.Identity(), 0.5), 2)
    ranks = Simulation(
        spec, TwoLevelSelection(gc.DGC(0.1, momentum_factor=0.5, mask=False), 0.02, "dense"), 2
    )
    for _ in range(3):
        assert same_bytes(ranks.step().mean(0), plain.step().mean(0))


def test_nothing_is_selected_that_nobody_asked_for(monkeypatch):
    monkeypatch.setattr(gc.TopK, "select", lambda *_: pytest.fail("selected"))
    ranks = Simulation(LAYERS, TwoLevelSelection(gc.TopK(0.1), 0.02, "dense"), 2)
    ranks.step()
    # At a factor of one there is nothing to select either.
    everything = Simulation(LAYERS, TwoLevelSelection(gc.TopK(1.0), 1.0, "dense"), 2)
    seen = watched(everything)
    everything.step()
    for noted in seen:
        assert noted.of(TOTAL).tolist() == noted.of(KEPT).tolist() == noted.of(KEPT_BY_CANDIDATE).tolist()
        assert noted.of(TOTAL)[0] > 0


def test_a_value_that_is_not_finite_shows_in_what_is_noted():
    ranks = Simulation(LAYERS, TwoLevelSelection(gc.TopK(0.2), 0.05), 2)
    gradients, seen = ranks.gradients(), watched(ranks)
    gradients[1][0][7] = np.nan
    ranks.step(gradients)
    assert np.isnan(seen[1].of(TOTAL)[0])
    assert np.isfinite(seen[0].of(TOTAL)).all()


def test_bytes_are_those_of_what_is_sent():
    def sent(compressor):
        group = Simulation(LAYERS[:1], compressor, 2).pipelines[0].layout.buckets[0].groups[0]
        return group.compressor.wire_bytes(group).tolist()

    assert sent(TwoLevelSelection(gc.TopK(0.2), 0.03)) == sent(gc.TopK(0.03))
    assert sent(TwoLevelSelection(gc.TopK(0.2), 0.03, "minimum")) == sent(gc.TopK(0.2))
    assert sent(TwoLevelSelection(gc.TopK(0.2), 0.03, "dense")) == [4 * 520]
    assert sent(TwoLevelSelection(gc.RandomK(0.2), 0.03)) == sent(gc.RandomK(0.03)) == [4 * 16]
    assert sent(TwoLevelSelection(gc.RandomK(0.2), 0.03, "minimum")) == sent(gc.RandomK(0.2))


def test_it_goes_inside_of_wrappers():
    wrapped = gc.LocalClip(gc.ErrorFeedback(gc.TopK(0.5), decay=0.9), 2.0)
    assert select_twice(wrapped, 0.1, 0.02, "minimum") == gc.LocalClip(
        gc.ErrorFeedback(TwoLevelSelection(gc.TopK(0.1), 0.02, "minimum"), decay=0.9), 2.0
    )
    again = select_twice(TwoLevelSelection(gc.TopK(0.5), 0.3, "dense"), 0.1, 0.02, "candidate")
    assert again == TwoLevelSelection(gc.TopK(0.1), 0.02)
