"""LGC's parameter-server form: what every rank decodes, learns, sends and keeps, and ranks that lie."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from compress.learning import (
    LAYERS,
    SENT,
    SMALL,
    A,
    B,
    job,
    largest,
    nets_of,
    owe_nothing,
    weights_of,
    without_momentum,
)

from gradcomp import LGC, StateError
from gradcomp.contrib.lgc.server import Decoders
from gradcomp.exchange.snapshot import merge, restore, snapshot
from gradcomp.testing.recording import payload_of
from gradcomp.testing.simulation import Simulation

SERVER = replace(SMALL, form="server")
INNOVATIONS = {A: 2, B: 3}


def server(**settings) -> LGC:
    return without_momentum(form="server", **settings)


def leader_of(ranks: Simulation, compressor: LGC = SERVER) -> int:
    return compressor.leader(ranks.pipelines[0]._context())


def parts(gradients, leader: int) -> tuple[dict[int, np.ndarray], np.ndarray, np.ndarray]:
    """The leader's positions in A and B; there, all ranks' values, and which of them are innovations."""
    at = {layer: largest(gradients[leader][layer], SENT[layer]) for layer in (A, B)}
    values = [np.concatenate([g[layer][at[layer]] for layer in (A, B)]) for g in gradients]
    marks = [
        np.concatenate([np.isin(at[layer], largest(g[layer], INNOVATIONS[layer])) for layer in (A, B)])
        for g in gradients
    ]
    return at, np.array(values), np.array(marks)


# --- what is sent -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("average", [True, False])
def test_every_rank_decodes_the_leaders_code_with_each_ranks_innovations(average: bool):
    ranks = job(server(train_steps=0), world=3, average=average)
    weights, net = weights_of(ranks), Decoders(4, 3)
    divisor = 3 if average else 1
    for _ in range(3):
        owe_nothing(ranks)
        gradients, leader = ranks.gradients(), leader_of(ranks)
        for layer in (A, B):  # what two ranks have in common
            gradients[1][layer][:9] = gradients[2][layer][:9] = 4 + np.arange(9)
        at, values, marks = parts(gradients, leader)
        means = ranks.step(gradients).all_means()
        assert marks.any()
        assert not marks.all()
        innovations = np.where(marks, values, np.float32(0))
        found = net.decode(weights, net.encode(weights, values[leader]), innovations).sum(0) / divisor
        for layer, expected in ((A, found[: SENT[A]]), (B, found[SENT[A] :])):
            outside = np.zeros(LAYERS[layer].size, np.float32)
            for g in gradients:
                own = np.setdiff1d(largest(g[layer], INNOVATIONS[layer]), at[layer])
                outside[own] += g[layer][own]
            mean = means[layer].copy()
            np.testing.assert_allclose(mean[at[layer]], expected, rtol=1e-5, atol=1e-6 * np.abs(found).max())
            mean[at[layer]] = 0
            assert outside.any()
            np.testing.assert_array_equal(mean, outside / np.float32(divisor))


def test_training_is_from_the_leaders_code_with_innovations_as_they_will_be():
    ranks, net = job(server(), world=3), Decoders(4, 3)
    weights = weights_of(ranks)
    np.testing.assert_array_equal(weights, net.first_weights(0))
    gradients, leader = ranks.gradients(), leader_of(ranks)
    for layer in (A, B):
        gradients[0][layer][:9] = gradients[2][layer][:9] = 4 + np.arange(9)
    at, values, marks = parts(gradients, leader)
    assert marks.any(axis=1).sum() >= 2
    assert not marks.all()
    means = ranks.step(gradients).all_means()
    for layer in (A, B):
        assert np.flatnonzero(means[layer]).tolist() == at[layer].tolist()
    samples = (values / np.sqrt((values.astype(np.float64) ** 2).sum() / 3)).astype(np.float32)
    innovations = np.where(marks, samples, np.float32(0))
    trained, loss = net.train(weights, samples, innovations, leader, 0.001)
    np.testing.assert_allclose(weights_of(ranks), trained, rtol=0, atol=1e-7)
    assert nets_of(ranks)[-2] == pytest.approx(0.95 + 0.05 * loss, rel=1e-5)
    assert loss < 1  # zeros have that


@pytest.mark.parametrize(("channels", "innovation"), [(4, 0.1), (1, 0.0)])
def test_bytes_are_those_that_are_documented(channels: int, innovation: float):
    compressor = server(
        train_steps=1, code_channels=channels, innovation=innovation, indices="raw", train_share=1.0
    )
    ranks = job(compressor, record=True, reorder=False)
    indices, code = 4 * 50, 4 * channels * 4  # 50 values are padded to 64
    innovations = 8 * 5 if innovation else 0
    for gathered in ([4 * 50 + 7], [innovations] if innovation else []):
        led = indices if gathered == [4 * 50 + 7] else code + indices
        leader = leader_of(ranks)
        ranks.step()
        for r, rank in enumerate(ranks.ranks):
            sizes = [len(payload_of(data)) for kind, data in rank.transport.sent if kind == "allgatherv"]
            wanted = [*([led] if r == leader else []), *gathered]
            assert [size for size in sizes if size in wanted] == wanted, (sizes, wanted)
            rank.transport.sent.clear()
        learning = [
            g for b in ranks.pipelines[0].layout.buckets for g in b.groups if g.compressor.traits.learns
        ]
        assert [g.compressor.wire_bytes(g).sum() for g in learning] == [led + sum(gathered)]


# --- what is kept -----------------------------------------------------------------------------------------------


@pytest.mark.full
def test_ranks_stay_identical_over_500_steps():
    ranks = job(replace(SERVER, warmup_steps=20, train_steps=40, feedback=True), 3, shuffle=True)
    for _ in range(500):
        ranks.step().all_means()
    weights_of(ranks)


def test_values_that_are_not_finite_are_seen_everywhere_and_spoil_no_other_layer():
    ranks = job(server(train_steps=1), world=2)
    for step in range(3):
        gradients, before = ranks.gradients(), ranks.state()
        gradients[step % 2][B][7] = np.inf
        outcome = ranks.step(gradients)
        assert outcome.result.nonfinite.tolist() == [i == B for i in range(len(LAYERS))]
        assert np.isfinite(outcome.mean(A)).all()
        assert ranks.state() == before


def test_innovations_leave_nothing_and_their_momentum_starts_again():
    ranks = job(replace(SERVER, warmup_steps=0, train_steps=0), 2)
    gradients, leader = ranks.gradients(), leader_of(ranks)
    ranks.step(gradients)
    for r, pipeline in enumerate(ranks.pipelines):
        for layer in (A, B):
            sent = np.union1d(
                largest(gradients[leader][layer], SENT[layer]),
                largest(gradients[r][layer], INNOVATIONS[layer]),
            )
            for held in (pipeline.residuals.first, pipeline.fields["momentum"]):
                assert np.setdiff1d(
                    np.arange(LAYERS[layer].size), np.flatnonzero(held.value(layer))
                ).tolist() == (sent.tolist())


@pytest.mark.parametrize("nets", ["five", "four", "earlier"])
@pytest.mark.parametrize("world", [2, 4])
def test_other_ranks_keep_their_decoders_and_new_ones_begin_anew(world: int, nets: str):
    number = 5 if nets == "five" else 4
    old = job(replace(SERVER, deconvolutions=number), world=3)
    for _ in range(4):
        old.step()
    state, net = nets_of(old), Decoders(4, 3, deconvolutions=number)
    saved = np.append(state[: net.size], state[-2]) if nets == "earlier" else state
    new = job(SERVER, world=world)
    for rank, pipeline in enumerate(new.pipelines):
        merged = merge((snapshot(p) for p in old.pipelines), rank, world)
        merged.fields["shared_lgc_server_4"]["a"] = saved
        restore(pipeline, merged, 2.0)
        pipeline.lay_out()
    found, expected = nets_of(new), replace(net, ranks=world).adapted(state[: net.size], 0)
    np.testing.assert_array_equal(found[: len(expected)], expected)
    np.testing.assert_array_equal(found[-2:], state[-2:])
    for _ in range(3):
        new.step().all_means()


def test_nets_of_an_unknown_kind_are_refused():
    form = SERVER.nets
    state = form.begin(np.zeros(0, np.float32), 0, 2)
    state[-1] = 3
    with pytest.raises(StateError, match="nets of 3 deconvolutions"):
        form.unpack(state, 2)


def test_weights_of_no_number_of_ranks_are_refused():
    old = job(SERVER, world=2)
    for _ in range(4):
        old.step()
    state = merge((snapshot(p) for p in old.pipelines), 0, 2)
    (kind,) = (name for name in state.fields if "lgc" in name)
    state.fields[kind]["a"] = state.fields[kind]["a"][:-5]
    with pytest.raises(StateError, match=f"missing {kind} of 'a'"):
        restore(job(SERVER, world=2).pipelines[0], state)


@pytest.mark.parametrize("refresh", [1, 4])
def test_a_layer_that_is_not_finite_spoils_no_other_layer_while_indices_are_kept(refresh: int):
    ranks = job(server(refresh=refresh), 2)
    for _ in range(6):
        ranks.step()
    for _ in range(4):
        gradients = ranks.gradients()
        for rank in gradients:
            rank[B][:] = np.inf
        outcome = ranks.step(gradients)
        assert outcome.result.nonfinite.tolist() == [i == B for i in range(len(LAYERS))]
        assert np.isfinite(outcome.mean(A)).all()
        ranks.step()
