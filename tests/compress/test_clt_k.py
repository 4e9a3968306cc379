"""Tests indices that one rank selects for all, under CLT-k and LGC: who leads, how long they stay, leaders that lie."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
from compress.learning import LAYERS, A, B, check_resumed, job, support, without_momentum
from compress.selecting import largest

from gradcomp import CLTk, LayerSpec, StateError, TransportError, WireFormatError
from gradcomp.compress.sparse.payload import KEPT
from gradcomp.exchange.snapshot import merge, restore, snapshot
from gradcomp.reduce.header import ByteHeader
from gradcomp.testing.recording import payload_of
from gradcomp.testing.simulation import Simulation, true_mean

THREE = [LayerSpec("a", (40,)), LayerSpec("empty", (0,)), LayerSpec("b", (4, 5))]
HEADER = ByteHeader.size(len(THREE))


@pytest.mark.parametrize("world", [1, 2, 3])
def test_ranks_lead_in_turns(world: int):
    ranks = Simulation(THREE, CLTk(0.1, feedback=False), world)
    for step in range(2 * world):
        gradients = ranks.gradients()
        means = ranks.step(gradients).all_means()
        for layer, k in ((0, 4), (2, 2)):
            sent = largest(gradients[step % world][layer], k)
            np.testing.assert_array_equal(support(means[layer]), sent)
            np.testing.assert_allclose(means[layer][sent], true_mean(gradients, layer)[sent], rtol=1e-5)


def test_of_equals_the_first_are_sent():
    ranks = Simulation([THREE[0]], CLTk(0.1, feedback=False))
    mean = ranks.step([[np.ones(40, np.float32)], [np.full(40, 3, np.float32)]]).mean(0)
    np.testing.assert_array_equal(mean, [2] * 4 + [0] * 36)


def test_the_leader_selects_with_its_residual():
    ranks = Simulation([THREE[2]], CLTk(0.05), 1)
    gradient = np.zeros(20, np.float32)
    gradient[[3, 7]] = 3.0, 2.0
    supports = [support(ranks.step([[gradient]]).mean(0)).tolist() for _ in range(4)]
    assert supports == [[3], [7], [3], [7]]  # 3 before 2, then 3 before 4, then 6 before 2


def test_only_the_leader_sends_indices():
    ranks = Simulation(THREE, CLTk(0.1, indices="raw"), 3, record=True, reorder=False)
    for leader in range(3):
        ranks.step()
        for rank in ranks.ranks:
            (_, broadcast), (_, summed) = rank.transport.sent
            assert len(payload_of(broadcast)) == (4 * 6 if rank.pipeline.transport.rank == leader else 0)
            assert len(summed) == 4 * 6
            rank.transport.sent.clear()


def test_a_model_of_empty_layers_takes_a_step():
    ranks = Simulation([THREE[1]], CLTk(0.1), 2)
    assert ranks.step().mean(0).size == 0


# --- indices that stay for several steps --------------------------------------------------------------------

KINDS = {
    "clt-k": CLTk(0.01, refresh=3, indices="raw"),
    "phase 2": without_momentum(train_steps=90, refresh=3, train_share=0.1),
    "phase 3": without_momentum(train_steps=0, refresh=3),
    "server, phase 2": without_momentum(train_steps=90, refresh=3, train_share=0.1, form="server"),
    "server, phase 3": without_momentum(train_steps=0, refresh=3, form="server", innovation=0),
}
WITHOUT_PERIODS = {"clt-k in every step": CLTk(0.01), "phase 2 in every step": without_momentum()}
CODED = ["phase 3", "server, phase 3"]
kinds = pytest.mark.parametrize("kind", KINDS)
some = pytest.mark.parametrize("kind", ["clt-k", "phase 2", "phase 3"])


def ranks_of(kind: str, world: int = 2, **settings) -> Simulation:
    return job((KINDS | WITHOUT_PERIODS)[kind], world, **settings)


def broadcasts(ranks: Simulation, gradients=None) -> int:
    """Takes a step and counts the messages of bytes in which one rank sends more than the others."""
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
def test_a_period_continues_after_a_step_that_was_not_accepted(kind: str):
    ranks = ranks_of(kind, record=True, reorder=False)
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
    assert broadcasts(ranks) > 0
    assert broadcasts(ranks) == 0


@pytest.mark.parametrize("kind", ["clt-k in every step", "clt-k", "phase 2", "phase 3"])
@pytest.mark.parametrize("rank", range(2))
def test_a_value_that_is_not_finite_is_seen_whether_its_rank_leads_or_not(kind: str, rank: int):
    """Rank 1 leads the second step. If indices stay, that step has no broadcast."""
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
def test_a_run_continues_with_the_indices_that_it_had(kind: str, stop: int):
    check_resumed(KINDS[kind], stop)


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
    layers = [LAYERS[0], LayerSpec("large", (300, 400)), *LAYERS[-2:]]
    ranks = Simulation(layers, CLTk(0.0001, refresh=2), 2)
    at = support(ranks.step().mean(1))
    assert at.max() > 65536
    np.testing.assert_array_equal(support(ranks.step().mean(1)), at)


@pytest.mark.parametrize("kind", WITHOUT_PERIODS)
def test_without_periods_nothing_is_kept(kind: str):
    ranks = ranks_of(kind)
    ranks.step()
    assert KEPT not in ranks.pipelines[0].fields.names


# --- leaders that lie ---------------------------------------------------------------------------------------


def bytes_of(*numbers: int) -> bytes:
    return np.array(numbers, "<u4").tobytes()


# Four indices below 40, then two below 20.
LIES = {
    "above": ("raw", bytes_of(1, 2, 3, 40), "not below"),
    "largest": ("raw", bytes_of(1, 2, 3, 2**32 - 1), "not below"),
    "equal": ("raw", bytes_of(3, 3), "not ascending"),
    "descending": ("raw", bytes_of(4, 3), "not ascending"),
    "above, second layer": ("raw", bytes_of(0, 1, 2, 3, 4, 20), "not below"),
    "packed": ("packed", b"\xff" * 64, ""),
    "bitmap": ("bitmap", b"\xff" * 64, ""),
    **{
        f"deflated {each}": ("deflate", zlib.compress(bytes_of(*each)), "")
        for each in ((1, 2, 1, 1, 1), (1, 2, 1, 1, 1, 1, 1), (0, 2, 1, 1, 1, 1), (1, 20, 1, 1, 1, 1))
    },
}


@pytest.mark.parametrize(("coding", "lie", "complaint"), LIES.values(), ids=LIES)
def test_impossible_indices_are_an_error_on_who_gets_them(coding: str, lie: bytes, complaint: str):
    """Rank 0 leads. The lie replaces the beginning of the indices that rank 1 gets; their size stays."""

    def tamper(source: int, destination: int, message: np.ndarray) -> np.ndarray:
        end = len(payload_of(message)) if len(message) else 0
        # The announcement of a deflated size is 8 bytes long.
        if (source, destination) == (0, 1) and end > (8 if coding == "deflate" else 0):
            data = (lie.ljust(end, b"\0") if coding == "deflate" else lie)[:end]
            message[HEADER : HEADER + len(data)] = np.frombuffer(data, np.uint8)
        return message

    ranks = Simulation(THREE, CLTk(0.1, indices=coding), 3, tamper=tamper, reorder=False)
    errors = ranks.attempt()
    assert isinstance(errors[1], WireFormatError)
    assert complaint in str(errors[1])
    assert "rank 0" in str(errors[1])
    assert isinstance(errors[2], TransportError)
