"""Indices that stay for several steps, under CLT-k and LGC."""

from __future__ import annotations

import numpy as np
import pytest
from compress.learning import LAYERS, A, B, job, largest, support, without_momentum

from gradcomp import CLTk, Compressor, StateError
from gradcomp.compress.sparse.payload import KEPT
from gradcomp.exchange.snapshot import merge, restore, snapshot
from gradcomp.testing.simulation import Simulation, true_mean

KINDS = {
    "clt-k": CLTk(0.01, refresh=3, indices="raw"),
    "phase 2": without_momentum(train_steps=90, refresh=3, train_share=0.1),
    "phase 3": without_momentum(train_steps=0, refresh=3),
    "server, phase 2": without_momentum(train_steps=90, refresh=3, train_share=0.1, form="server"),
    "server, phase 3": without_momentum(train_steps=0, refresh=3, form="server", innovation=0),
}
CODED = ["phase 3", "server, phase 3"]
kinds = pytest.mark.parametrize("kind", KINDS)
some = pytest.mark.parametrize("kind", ["clt-k", "phase 2", "phase 3"])


def ranks_of(kind: str, world: int = 2, **settings) -> Simulation:
    return job(KINDS[kind], world, **settings)


def broadcasts(ranks: Simulation, gradients=None) -> int:
    """Messages of bytes in one more step, in which one rank sends more than a header and flags."""
    for rank in ranks.ranks:
        rank.transport.sent.clear()
    ranks.step(gradients).all_means()
    gathered = [[data for kind, data in rank.transport.sent if kind == "allgatherv"] for rank in ranks.ranks]
    return sum(len({len(data) for data in messages}) > 1 for messages in zip(*gathered, strict=True))


@kinds
@pytest.mark.parametrize("world", [2, 3])
def test_the_leader_of_a_period_selects_in_its_first_step(kind: str, world: int):
    ranks = ranks_of(kind, world)
    leaders = []
    for step in range(12):
        for pipeline in ranks.pipelines:  # nothing is owed
            for layer in (A, B):
                pipeline.residuals.first.set(layer, np.zeros(LAYERS[layer].size, np.float32))
        gradients = ranks.gradients()
        means = ranks.step(gradients).all_means()
        if step % 3 == 0:
            tops = [[largest(g[layer], k) for layer, k in ((A, 20), (B, 30))] for g in gradients]
            found = [support(means[layer]) for layer in (A, B)]
            (leader,) = [r for r, top in enumerate(tops) if all(map(np.array_equal, top, found))]
            leaders.append(leader)
            kept = found
        for layer, at in zip((A, B), kept, strict=True):
            np.testing.assert_array_equal(support(means[layer]), at)
            if kind not in CODED:
                np.testing.assert_allclose(
                    means[layer][at], true_mean(gradients, layer)[at], rtol=1e-5, atol=1e-6
                )
    if kind == "clt-k":
        assert leaders == [period % world for period in range(4)]


@pytest.mark.parametrize("kind", ["clt-k", "phase 2", "phase 3", "server, phase 2"])
def test_only_the_first_step_of_a_period_has_a_broadcast(kind: str):
    ranks = ranks_of(kind, record=True, reorder=False)
    first, *others = (broadcasts(ranks) for _ in range(3))
    assert first > 0
    assert others == [0, 0]
    assert broadcasts(ranks) == first


@some
def test_a_period_goes_on_after_a_step_that_was_not_accepted(kind: str):
    ranks = ranks_of(kind, record=True, reorder=False)
    for rank in ranks.ranks:
        rank.transport.sent.clear()
    ranks.step(commit=False)
    assert broadcasts(ranks) > 0  # nothing was kept
    assert broadcasts(ranks) == 0
    assert broadcasts(ranks) > 0  # step 3
    ranks.step(commit=False)
    assert broadcasts(ranks) == 0


@some
def test_a_layer_without_gradients_in_the_first_step_is_selected_later(kind: str):
    ranks = ranks_of(kind, record=True, reorder=False)
    assert broadcasts(ranks, ranks.gradients([A])) > 0
    gradients = ranks.gradients()
    assert broadcasts(ranks, gradients) > 0
    assert broadcasts(ranks) == 0


@some
@pytest.mark.parametrize("rank", range(2))
def test_a_value_that_is_not_finite_is_seen_without_a_broadcast(kind: str, rank: int):
    ranks = ranks_of(kind)
    ranks.step()
    before = ranks.state()
    gradients = ranks.gradients()
    gradients[rank][B][7] = np.nan
    outcome = ranks.step(gradients)
    assert outcome.result.nonfinite.tolist() == [i == B for i in range(len(LAYERS))]
    assert np.isnan(outcome.mean(B)).all()
    assert np.isfinite(outcome.mean(A)).all()
    assert outcome.committed == [False] * 2
    assert ranks.state() == before


@kinds
@pytest.mark.parametrize("stop", [2, 3, pytest.param(4, marks=pytest.mark.full)])
def test_a_run_goes_on_with_the_indices_that_it_had(kind: str, stop: int):
    straight, first, again = (ranks_of(kind, shuffle=True) for _ in range(3))
    for _ in range(stop):
        first.step()
    again.drawn = first.drawn
    for old, new in zip(first.pipelines, again.pipelines, strict=True):
        restore(new, snapshot(old))
    for step in range(7):
        want = straight.step().all_means()
        if step >= stop:
            assert [m.tobytes() for m in again.step().all_means()] == [m.tobytes() for m in want]
    assert again.state() == straight.state()


@pytest.mark.parametrize("unit", [1.0, 3.0])
def test_other_ranks_and_units_keep_indices(unit: float):
    old, new = ranks_of("phase 3", 3), ranks_of("phase 3", 2)
    at = support(old.step().mean(A))
    for rank, pipeline in enumerate(new.pipelines):
        restore(pipeline, merge((snapshot(p) for p in old.pipelines), rank, 2), unit)
    np.testing.assert_array_equal(support(new.step().mean(A)), at)


@pytest.mark.parametrize(("place", "value"), [(-1, 2000.0), (-1, 0.0), (1, 1.0), (-1, -1.0)])
def test_indices_that_none_can_have_are_an_error(place: int, value: float):
    ranks = ranks_of("phase 3")
    ranks.step()
    for pipeline in ranks.pipelines:
        kept = pipeline.fields[KEPT].value(A).copy()
        kept[place] = value
        pipeline.fields[KEPT].set(A, kept)
    assert all(isinstance(error, StateError) for error in ranks.attempt())


def test_indices_beyond_65536_stay_what_they_are():
    ranks = Simulation(
        [*LAYERS[:1], type(LAYERS[0])("large", (300, 400)), *LAYERS[-2:]], CLTk(0.0001, refresh=2), 2
    )
    gradients = ranks.gradients()
    at = support(ranks.step(gradients).mean(1))
    assert at.max() > 65536
    np.testing.assert_array_equal(support(ranks.step().mean(1)), at)


def test_without_periods_nothing_is_kept():
    kinds: list[Compressor] = [CLTk(0.01), without_momentum()]
    for compressor in kinds:
        ranks = job(compressor)
        ranks.step()
        assert KEPT not in ranks.pipelines[0].fields.names
