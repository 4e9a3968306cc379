"""LGC: its phases, what it sends, what it learns, and ranks that lie."""

from __future__ import annotations

import zlib
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from compress.learning import (
    BIAS,
    FILTER,
    FIRST,
    LAST,
    LAYERS,
    NORM,
    SENT,
    SMALL,
    A,
    B,
    job,
    largest,
    nets_of,
    owe_nothing,
    support,
    weights_of,
    without_momentum,
)

from gradcomp import (
    DGC,
    EF21,
    LGC,
    Config,
    ConfigError,
    DensitySchedule,
    LayerSpec,
    LGreCo,
    Policy,
    Warmup,
    WireFormatError,
)
from gradcomp.compress import as_policy, from_string
from gradcomp.compress.messages import Reply
from gradcomp.contrib.lgc.autoencoder import Autoencoder
from gradcomp.exchange.snapshot import merge, restore, snapshot
from gradcomp.job.start import propose, refusal
from gradcomp.kernels.devices import HOST
from gradcomp.reduce.header import ByteHeader
from gradcomp.testing.recording import payload_of
from gradcomp.testing.simulation import Simulation, true_mean

# --- phases and places ------------------------------------------------------------------------------------------


def test_the_three_phases_change_between_the_same_steps_on_all_ranks():
    ranks = job(world=3, shuffle=True, delay=0.3)
    sizes = []
    for _ in range(8):
        means = ranks.step().all_means()
        assert all(means[layer].all() for layer in (FIRST, NORM, BIAS))  # exact in all phases
        sizes.append([len(support(means[layer])) for layer in (A, B, LAST)])
    assert sizes[:2] == [[layer.size for layer in (LAYERS[A], LAYERS[B], LAYERS[LAST])]] * 2
    assert sizes[2:] == [list(SENT.values())] * 6
    plan = ranks.pipelines[0].plan.by_layer
    assert "train_steps=0" in plan["a"].compressor
    assert plan["last"].compressor.startswith("momentum_correction[clt_k")
    assert plan["first"].compressor.startswith("momentum_correction[none]")


def test_steps_that_are_skipped_count_teach_nothing_and_spoil_no_other_layer():
    ranks = job(world=2)
    for _ in range(3):
        ranks.step()
    before, state = weights_of(ranks), ranks.state()
    gradients = ranks.gradients()
    gradients[1][B][7] = np.nan
    outcome = ranks.step(gradients)
    assert outcome.committed == [False] * 2
    assert outcome.result.nonfinite.tolist() == [i == B for i in range(len(LAYERS))]
    assert ranks.state() == state
    ranks.step(commit=False)
    assert ranks.state() == state
    np.testing.assert_array_equal(weights_of(ranks), before)
    # 5 steps have passed all the same.
    assert "train_steps=0" in ranks.pipelines[1].plan.by_layer["a"].compressor
    assert ranks.step().committed == [True] * 2
    gradients = ranks.gradients()
    gradients[0][B][7] = np.inf
    outcome = ranks.step(gradients)  # a code mixes layers: the others' values are in it alone
    assert outcome.result.nonfinite.tolist() == [i == B for i in range(len(LAYERS))]
    assert np.isfinite(outcome.mean(A)).all()


@pytest.mark.parametrize(
    ("form", "train_steps", "world"),
    [
        *[("ring", 25, 2), ("server", 10, 3)],
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in [("ring", 25, 3), ("server", 10, 2), ("server", 10, 4)]
        ),
    ],
)
def test_ranks_stay_identical_through_all_phases(form: str, train_steps: int, world: int):
    compressor = replace(SMALL, form=form, warmup_steps=5, train_steps=train_steps)
    ranks = job(compressor, world, shuffle=True, delay=0.2)
    for step in range(60):
        absent = [A] if step in (7, 40, 41, 42, 43) else []
        ranks.step(ranks.gradients(absent), commit=step not in (12, 33)).all_means()
        if step > 4:
            weights_of(ranks)


def test_the_settings_of_the_paper_are_the_defaults():
    default = LGC()
    assert default.changes == (200, 500)
    assert (default.density, default.momentum_factor, default.learning_rate) == (0.001, 0.9, 0.001)
    assert (default.innovation, default.similarity) == (0.1, 0.5)
    assert from_string("lgc") == default
    assert from_string("lgc:form=server") == LGC(form="server")
    assert default.at_step(199).traits.exact
    assert default.at_step(199).traits.momentum == 0.9
    assert default.at_step(200) == LGC(warmup_steps=0)
    assert default.at_step(500) == LGC(warmup_steps=0, train_steps=0)


def test_it_is_a_family_under_other_wrappers_and_policies():
    policy = Policy("topk:density=0.1", overrides={"[ab]": SMALL}, filter=FILTER)
    plan = policy.plan(LAYERS, step=9).by_layer
    assert [plan[name].compressor.split(":")[0] for name in ("first", "a", "b", "last")] == [
        "topk",
        "lgc",
        "lgc",
        "topk",
    ]
    later = Policy(Warmup(SMALL, 10), filter=FILTER)
    assert (
        later.plan(LAYERS, step=12).by_layer["a"]
        == Policy(SMALL, filter=FILTER).plan(LAYERS, step=2).by_layer["a"]
    )
    assert (
        later.plan(LAYERS, step=11).by_layer["last"].compressor
        == "momentum_correction[none]:factor=0.9,mask=true"
    )


# --- what is sent -----------------------------------------------------------------------------------------------


def test_a_drawn_leader_selects_for_all_ranks():
    compressor = without_momentum(train_steps=40)
    ranks = job(compressor, world=3)
    leaders = []
    for _ in range(12):
        owe_nothing(ranks)
        gradients = ranks.gradients()
        means = ranks.step(gradients).all_means()
        for layer in (A, B):
            tops = [largest(g[layer], SENT[layer]) for g in gradients]
            (leader,) = [r for r, top in enumerate(tops) if np.array_equal(top, support(means[layer]))]
            at = tops[leader]
            np.testing.assert_allclose(means[layer][at], true_mean(gradients, layer)[at], rtol=1e-5)
            leaders.append(leader)
    assert leaders[::2] == leaders[1::2]  # one leader in a step
    assert set(leaders) == {0, 1, 2}
    assert any(b != (a + 1) % 3 for a, b in pairwise(leaders[::2]))


@pytest.mark.parametrize("average", [True, False])
def test_the_result_is_the_decoded_mean_of_codes(average: bool):
    compressor = without_momentum(train_steps=0)
    ranks = job(compressor, world=3, average=average)
    weights, net = weights_of(ranks), Autoencoder(4)
    gradients = ranks.gradients()
    means = ranks.step(gradients).all_means()
    places = {layer: support(means[layer]) for layer in (A, B)}
    codes = [
        net.encode(weights, np.concatenate([g[layer][places[layer]] for layer in (A, B)])) for g in gradients
    ]
    found = net.decode(weights, np.sum(codes, axis=0) / np.float32(3), 50) * (1 if average else 3)
    for layer, part in ((A, found[:20]), (B, found[20:])):
        np.testing.assert_allclose(
            means[layer][places[layer]], part, rtol=1e-5, atol=1e-6 * np.abs(found).max()
        )


def test_training_is_on_values_over_the_norm_of_their_mean():
    compressor = without_momentum()
    ranks = job(compressor)
    weights, net = weights_of(ranks), Autoencoder(4)
    np.testing.assert_array_equal(weights, net.first_weights(0))
    gradients = ranks.gradients()
    means = ranks.step(gradients).all_means()
    rows = [np.concatenate([g[layer][support(means[layer])] for layer in (A, B)]) for g in gradients]
    samples = np.array(rows)
    norm = np.linalg.norm(samples.astype(np.float64).sum(0).astype(np.float32) / np.float32(2))
    trained, _ = net.train(weights, (samples / norm).astype(np.float32), 0.001)
    np.testing.assert_allclose(weights_of(ranks), trained, rtol=0, atol=1e-7)
    assert not np.array_equal(weights_of(ranks), weights)


@pytest.mark.parametrize(("share", "nbytes"), [("auto", 4 * 50 + 4), (1.0, 4 * 50)])
def test_bytes_are_those_that_are_documented(share: float | str, nbytes: int):
    compressor = without_momentum(train_steps=1, code_channels=1, train_share=share)
    ranks = job(compressor, record=True, reorder=False)
    for gathered in (True, False):
        ranks.step()
        sent = [(kind, data) for rank in ranks.ranks for kind, data in rank.transport.sent if len(data) > 0]
        sizes = sorted((kind, len(payload_of(data) if kind == "allgatherv" else data)) for kind, data in sent)
        assert (("allgatherv", nbytes) in sizes) == gathered
        assert (("allreduce", 4 * (64 // 16)) in sizes) != gathered
        for rank in ranks.ranks:
            rank.transport.sent.clear()


@pytest.mark.parametrize(
    ("settings", "led", "gathered", "summed"),
    [
        ({"train_steps": 9, "train_share": 1.0}, 4 * 50, 4 * 50, 0),
        ({"train_steps": 9, "refresh": 5}, 4 * 10, 4 * 50 + 4, 0),
        ({"train_steps": 0, "code_channels": 1}, 4 * 50, 0, 4 * 64 / 16),
        ({"train_steps": 9, "train_share": 1.0, "form": "server"}, 4 * 50, 4 * 50 + 7, 0),
        ({"train_steps": 0, "form": "server"}, 4 * 50 + 4 * 64 / 4, 8 * 5, 0),
    ],
)
def test_the_forecast_tells_a_broadcast_a_gather_and_a_sum_apart(
    settings, led: int, gathered: int, summed: int
):
    compressor = without_momentum(indices="raw", **settings)
    pipeline = job(compressor, 4).pipelines[0]
    pipeline.lay_out()
    expected = 3 / 4 * led + 3 * gathered + 3 / 2 * summed
    assert pipeline.predicted[[A, B]].sum() == pytest.approx(expected)


def test_the_order_in_which_gradients_come_changes_nothing():
    def means(**settings) -> list[bytes]:
        ranks = job(SMALL, 2, **settings)
        return [mean.tobytes() for _ in range(8) for mean in ranks.step().all_means()]

    plain = means(reorder=False)
    assert means(shuffle=True, delay=0.4, seed=3) == plain
    assert means(shuffle=True, delay=0.4, seed=4, slice_elements=500) == plain


# --- what is kept -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [{}, {"form": "server"}, pytest.param({"form": "server", "innovation": 0.0}, marks=pytest.mark.full)],
    ids=["ring", "server", "server without innovations"],
)
@pytest.mark.parametrize("feedback", [True, False])
def test_what_was_not_applied_is_owed_only_with_feedback(feedback: bool, settings):
    ranks = job(without_momentum(train_steps=2, feedback=feedback, **settings), 3)
    missing = [np.zeros(layer.size) for layer in LAYERS]
    for step in range(8):
        gradients = ranks.gradients()
        means = ranks.step(gradients).all_means()
        for layer in (A, B, LAST):
            missing[layer] += true_mean(gradients, layer) - means[layer]
            telescopes = np.allclose(missing[layer], ranks.owed(layer), rtol=0, atol=1e-5)
            assert telescopes == (feedback or layer == LAST or step < 2), (step, layer)


@pytest.mark.parametrize(
    ("form", "stop"),
    [
        *[("ring", stop) for stop in (1, 3, 5, 7)],
        *[("server", stop) for stop in (3, 7)],
        pytest.param("server", 5, marks=pytest.mark.full),
    ],
)
def test_a_run_goes_on_bit_for_bit_in_any_phase(form: str, stop: int):
    straight, first, again = (job(replace(SMALL, form=form), shuffle=True) for _ in range(3))
    for _ in range(stop):
        first.step()
    again.drawn = first.drawn
    for old, new in zip(first.pipelines, again.pipelines, strict=True):
        restore(new, snapshot(old))
    for step in range(9):
        want = straight.step().all_means()
        if step >= stop:
            assert [m.tobytes() for m in again.step().all_means()] == [m.tobytes() for m in want]
    assert again.state() == straight.state()
    np.testing.assert_array_equal(nets_of(again), nets_of(straight))


@pytest.mark.parametrize("unit", [1.0, 3.0])
def test_other_ranks_and_units_keep_the_weights(unit: float):
    old = job(world=3)
    for _ in range(4):
        old.step()
    weights = weights_of(old)
    new = job(world=2)
    for rank, pipeline in enumerate(new.pipelines):
        restore(pipeline, merge((snapshot(p) for p in old.pipelines), rank, 2), unit)
    np.testing.assert_array_equal(weights_of(new), weights)
    for _ in range(3):
        new.step().all_means()


def test_the_loss_is_kept_and_said_once(caplog):
    ranks = job(without_momentum(train_steps=4, learning_rate=0.0), world=2)
    net, expected, rows = Autoencoder(4), 1.0, []
    with caplog.at_level("INFO", "gradcomp"):
        for _ in range(4):
            gradients = ranks.gradients()
            owe_nothing(ranks)
            means = ranks.step(gradients).all_means()
            rows = [np.concatenate([g[layer][support(means[layer])] for layer in (A, B)]) for g in gradients]
            loss, _ = net.gradient(weights_of(ranks), np.array(rows) / np.linalg.norm(np.mean(rows, axis=0)))
            expected += 0.05 * (loss - expected)
        assert nets_of(ranks)[-2] == pytest.approx(expected, rel=1e-4)
        assert not caplog.records
        for _ in range(3):
            ranks.step()
    (said,) = caplog.records
    assert said.levelname == "WARNING"
    assert f"step 4: LGC sends codes; the loss of its training was {expected:.3f}" in said.getMessage()


# --- refusals ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        {"density": 0},
        {"momentum_factor": 1.0},
        {"warmup_steps": -1},
        {"train_steps": 1.5},
        {"code_channels": 0},
        {"code_channels": 65},
        {"learning_rate": -0.1},
        {"ends": None},
        {"least_parameters": True},
        {"feedback": 1},
        {"indices": "gzip"},
        {"form": "star"},
        {"innovation": 1.1},
        {"innovation": True},
        {"similarity": -1},
        {"similarity": float("nan")},
        {"deconvolutions": 3},
    ],
)
def test_impossible_settings_are_refused(arguments):
    with pytest.raises(ConfigError, match=next(iter(arguments))):
        LGC(**arguments)


def test_a_small_model_is_refused_and_told_what_suits_it():
    with pytest.raises(ConfigError, match=r"5000 parameters between .* 50000 .*DGC"):
        as_policy("lgc").plan(LAYERS)


def test_controllers_schedules_devices_and_a_late_begin_are_refused():
    class Device:
        driver = object()

    policy = Policy(SMALL, filter=FILTER)
    with pytest.raises(ConfigError, match="no controller"):
        propose(policy, LAYERS, controller=LGreCo())
    with pytest.raises(ConfigError, match="learns nothing"):
        EF21(without_momentum(train_steps=0, feedback=True))
    with pytest.raises(ConfigError, match="one density"):
        DensitySchedule(LGC())
    assert refusal(Config(), policy) is None
    assert refusal(Config(), as_policy(DGC()), Device(), 7) is None
    assert "GPU" in str(refusal(Config(), policy, Device()))
    assert refusal(Config(), policy, HOST, 1) is None  # it would still be exact
    assert "Warmup" in str(refusal(Config(), policy, HOST, 2))
    assert refusal(Config(), Policy(Warmup(SMALL, 2), filter=FILTER), HOST, 2) is None


# --- ranks that lie ---------------------------------------------------------------------------------------------

HEADER = ByteHeader.size(2)
LIES = [LayerSpec("a", (20, 20)), LayerSpec("b", (400,))]
RING, SERVER = without_momentum(ends=False), without_momentum(ends=False, train_steps=0, form="server")


def attempt(compressor: LGC, leads: int, number: int, begin: int, stream: bytes) -> Exception | None:
    """The error of rank 1, to which rank 0 sends an impossible stream in its message with this number.

    Four values a layer, one innovation each. Both rounds have a message of sizes, and then one of payloads. ``leads``:
    the rank that draws the indices. ``begin``: the payload's byte from which on the stream replaces it.
    """
    seen = 0

    def tamper(source: int, destination: int, message: np.ndarray) -> np.ndarray:
        nonlocal seen
        seen += (source, destination) == (0, 1)
        if (source, destination) == (0, 1) and seen == number:
            end = HEADER + len(payload_of(message))
            room = end - HEADER - begin
            message[HEADER + begin : end] = np.frombuffer(stream.ljust(room, b"\0")[:room], np.uint8)
        return message

    for seed in range(20):
        ranks = Simulation(LIES, compressor, 2, tamper=tamper, reorder=False, config_seed=seed)
        if compressor.leader(ranks.pipelines[0]._context()) == leads:
            return ranks.attempt()[1]
    raise AssertionError("no such leader")


def deflated(*gaps: int) -> bytes:
    return zlib.compress(np.array(gaps, "<u4").tobytes())


@pytest.mark.parametrize(
    ("compressor", "leads", "number", "begin", "stream"),
    [
        (RING, 0, 2, 0, zlib.compress(bytes(2**24))),
        (RING, 0, 2, 0, deflated(1, 2, 1, 1, 1, 1, 1)),
        (RING, 0, 2, 0, deflated(1, 0, 1, 1, 1, 1, 1, 1)),
        (RING, 0, 2, 0, deflated(1, 400, 1, 1, 1, 1, 1, 1)),
        (RING, 0, 2, 0, b"no stream"),
        (SERVER, 0, 2, 4 * 4, b"no stream"),  # behind the code
        (SERVER, 1, 4, 4 * 2, deflated(1)),
        (SERVER, 1, 4, 4 * 2, deflated(0, 1)),
        (SERVER, 1, 4, 4 * 2, deflated(401, 1)),
        (SERVER, 1, 4, 4 * 2, deflated(1, 1, 1)),
        (SERVER, 1, 4, 4 * 2, b"no"),
    ],
    ids=[
        *["bomb", "too few", "not ascending", "out of range", "no stream", "behind a code: no stream"],
        *[
            f"innovations: {what}"
            for what in ("too few", "not ascending", "out of range", "too many", "none")
        ],
    ],
)
def test_impossible_indices_are_an_error(compressor, leads: int, number: int, begin: int, stream: bytes):
    error = attempt(compressor, leads, number, begin, stream)
    assert isinstance(error, WireFormatError)
    assert "rank 0 sent an impossible sparse payload" in str(error)


def test_less_than_a_code_is_an_error():
    pipeline = Simulation(LIES, SERVER, 2).pipelines[1]
    pipeline.lay_out()
    (bucket,) = pipeline.layout.buckets
    exchange = SERVER.exchange(bucket.groups[0], pipeline._context())
    next(exchange)
    with pytest.raises(WireFormatError, match="10 bytes, fewer than the 16 in front of the indices"):
        exchange.send(Reply(np.zeros(2, np.uint8), np.zeros(10, np.uint8)))
