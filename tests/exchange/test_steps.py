"""The step protocol among ranks that take turns at random: what is exchanged, and what all conclude from it."""

from __future__ import annotations

import numpy as np
import pytest

from gradcomp import (
    Cast,
    Config,
    ConfigError,
    Identity,
    LayerSpec,
    Policy,
    Quantize,
    StateError,
    TransportError,
    WireFormatError,
)
from gradcomp.exchange.arrivals import Submission
from gradcomp.exchange.pipeline import Pipeline
from gradcomp.exchange.waiting import Waiting
from gradcomp.reduce.header import ByteHeader
from gradcomp.testing.simulation import SPARSE, Simulation, plan_for, same_bytes, true_mean
from gradcomp.transport.inprocess import World

LAYERS = [
    LayerSpec("a.weight", (31, 37)),
    LayerSpec("a.bias", (31,), kind="bias"),
    LayerSpec("b.weight", (40, 40)),
    LayerSpec("empty", (0,)),
    LayerSpec("c.weight", (1200, 1)),
]
MIXED = [
    LayerSpec("single", (300,)),
    LayerSpec("double", (70,), "float64"),
    LayerSpec("half", (200,), "float16"),
    LayerSpec("brain", (150,), "bfloat16"),
    LayerSpec("single2", (90,)),
    LayerSpec("double2", (300,), "float64"),
]
FEEDBACK = Quantize(4, 64, rounding="nearest")
SMALL = {"slice_elements": 500}  # several buckets, and layers in slices
RANDOM = {"shuffle": True, "delay": 0.4, **SMALL}


def policy() -> Policy:
    """Quantised, cast, summed and exact layers side by side."""
    return Policy(FEEDBACK, overrides={"b.*": Cast("bfloat16"), "c.*": Quantize(2, 32, "linf")})


# --- timing -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [2, 3, 5])
def test_no_timing_changes_a_byte(world: int):
    def run(**options) -> list[list[bytes]]:
        ranks = Simulation(LAYERS, policy(), world, reorder=False, **options)
        return [[mean.tobytes() for mean in ranks.step().all_means()] for _ in range(2)]

    want = run()
    for seed in range(5):
        assert run(seed=seed, **RANDOM) == want
        assert run(seed=seed, **RANDOM, overlap=False) == want


@pytest.mark.parametrize("seed", range(2))
def test_many_buckets_arrive_in_any_order(seed: int):
    layers = [LayerSpec(f"layer{i}", (40 + i,)) for i in range(60)]
    ranks = Simulation(layers, FEEDBACK, 3, seed=seed, shuffle=True, delay=0.5, slice_elements=64)
    assert len(ranks.pipelines[0].layout.buckets) > 50
    for _ in range(3):
        gradients = ranks.gradients()
        means = ranks.step(gradients).all_means()
        assert all(np.abs(m - true_mean(gradients, i)).max() < 2 for i, m in enumerate(means))


def handed_in(ranks: Simulation, *layers: int) -> None:
    """Open a step on every rank and submit these layers."""
    for rank, gradients in zip(ranks.ranks, ranks.gradients(), strict=True):
        rank.pipeline.open()
        for layer in layers:
            rank.submit(layer, gradients[layer])


@pytest.mark.parametrize("overlap", [True, False])
def test_a_bucket_travels_before_the_step_is_flushed_unless_buckets_may_not_overlap(overlap: bool):
    ranks = Simulation(LAYERS, Cast("bfloat16"), 2, slice_elements=1147 + 31, overlap=overlap)
    handed_in(ranks, *((0, 1) if overlap else range(len(LAYERS))))
    for _ in range(5):
        answers = [p.poll() for p in ranks.pipelines]
    assert answers == [Waiting.LAYERS] * 2
    assert [p.transport.bytes_sent > 0 for p in ranks.pipelines] == [overlap] * 2


@pytest.mark.parametrize(
    ("overlap", "order"),
    [
        # Round 0 of a bucket goes out before round 1 of the one before it ...
        (True, ["alltoallv", "alltoallv", "allgatherv", "alltoallv", "allgatherv", "allgatherv"]),
        # ... or every bucket on its own.
        (False, ["alltoallv", "allgatherv"] * 3),
    ],
)
def test_collectives_have_one_order(overlap: bool, order: list[str]):
    layers = [LayerSpec(name, (64,)) for name in "abc"]
    for seed in range(4):
        ranks = Simulation(
            layers, FEEDBACK, 2, seed=seed, shuffle=True, delay=0.4, record=True, slice_elements=64,
            overlap=overlap, reorder=False,
        )  # fmt: skip
        ranks.step()
        for rank in ranks.ranks:
            assert [kind for kind, _ in rank.transport.sent] == order


def test_a_step_in_which_all_layers_report_needs_no_flush():
    ranks = Simulation(LAYERS, Identity(), 2)
    handed_in(ranks, *range(len(LAYERS)))
    for _ in range(10):
        answers = [p.poll() for p in ranks.pipelines]
    assert answers == [Waiting.NOTHING] * 2
    assert all(p.commit() for p in ranks.pipelines)


@pytest.mark.parametrize("compression", [Identity(), Quantize(4, 64), FEEDBACK, Cast("bfloat16")])
@pytest.mark.parametrize("seed", range(2))
def test_dtypes_mix_in_one_model(compression, seed: int):
    ranks = Simulation(MIXED, compression, 3, seed=seed, shuffle=True, delay=0.3, slice_elements=200)
    for _ in range(3):
        gradients = ranks.gradients()
        means = ranks.step(gradients).all_means()
        for i, layer in enumerate(MIXED):
            rounding = {"float64": 1e-15, "float16": 2e-3, "bfloat16": 2e-2}.get(layer.dtype, 1e-6)
            bound = rounding if layer.dtype == "float64" or compression == Identity() else 2.0
            assert np.abs(means[i].astype(np.float64) - true_mean(gradients, i)).max() < bound, layer.name


# --- layers without a gradient ------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(2))
def test_a_layer_that_some_ranks_do_not_use_gets_the_mean_on_all(seed: int):
    ranks = Simulation(LAYERS, Identity(), 3, seed=seed, **RANDOM)
    gradients = ranks.gradients()
    gradients[1][2] = gradients[2][2] = None
    mean = ranks.step(gradients).mean(2)
    assert np.array_equal(mean, gradients[0][2] / np.float32(3))


@pytest.mark.parametrize("seed", range(2))
def test_a_layer_that_nobody_uses_is_not_written(seed: int):
    ranks = Simulation(LAYERS, policy(), 3, seed=seed, **RANDOM)
    outcome = ranks.step(ranks.gradients(absent=[1, 2]))
    assert [mean is None for mean in outcome.all_means()] == [False, True, True, False, False]
    assert outcome.result.present.tolist() == [True, False, False, True, True]
    assert outcome.committed == [True] * 3


@pytest.mark.parametrize("compression", [Identity(), FEEDBACK])
@pytest.mark.parametrize("elsewhere", [True, False])
def test_a_rank_without_gradient_may_offer_an_output(compression, elsewhere: bool):
    """It is written if another rank has a gradient, and left alone otherwise."""
    ranks = Simulation(LAYERS, compression, 2, reorder=False)
    offered = np.full(LAYERS[0].size, 5, np.float32)
    (gradients, _) = ranks.gradients(absent=[] if elsewhere else [0])
    for rank in ranks.ranks:
        rank.pipeline.open()
    ranks.ranks[0].submit(0, gradients[0])
    ranks.pipelines[1].arrivals.submit_absent(0, output=offered.ctypes.data)
    for p in ranks.pipelines:
        p.arrivals.flush()
    for _ in range(20):
        for p in ranks.pipelines:
            p.poll()
    if elsewhere:
        assert same_bytes(offered, ranks.ranks[0].outputs[0])
    else:
        assert (offered == 5).all()


def test_a_step_without_any_gradient_is_still_a_step():
    ranks = Simulation(LAYERS, policy(), 3, **RANDOM)
    outcome = ranks.step(ranks.gradients(absent=range(len(LAYERS))))
    assert outcome.all_means() == [None] * len(LAYERS)
    assert outcome.committed == [True] * 3
    assert [p.step for p in ranks.pipelines] == [1] * 3


def bucket_numbers(ranks: Simulation, layer: int) -> set[tuple[int, ...]]:
    return {p.layout.buckets_of[layer] for p in ranks.pipelines}


def test_a_cold_layer_moves_to_the_end_and_comes_back():
    ranks = Simulation(LAYERS, policy(), 3, **RANDOM, cold_after_steps=2, reorder=False)
    for step in range(3):
        assert all(p.ordering.cold == frozenset() for p in ranks.pipelines) or step == 2
        ranks.step(ranks.gradients(absent=[0]))
    last = len(ranks.pipelines[0].layout.buckets)
    assert {p.ordering.cold for p in ranks.pipelines} == {frozenset([0])}
    assert all(max(numbers) == last - 1 for numbers in bucket_numbers(ranks, 0))
    # It does not wait behind the others for its return: it is exchanged at once.
    gradients = ranks.gradients()
    assert ranks.step(gradients).mean(0) is not None
    ranks.step()
    ranks.step()
    assert {p.ordering.cold for p in ranks.pipelines} == {frozenset()}
    assert bucket_numbers(ranks, 0) == {(0, 1, 2)}


def test_cold_layers_hold_nobody_up():
    """Once the hot layers are in, their buckets travel, although the cold layer may still come."""
    ranks = Simulation(LAYERS, Identity(), 2, slice_elements=1200, cold_after_steps=1, reorder=False)
    for _ in range(2):
        ranks.step(ranks.gradients(absent=[0]))
    before = [rank.transport.bytes_sent for rank in ranks.ranks]
    handed_in(ranks, 1, 2, 3, 4)
    for _ in range(20):
        for p in ranks.pipelines:
            p.poll()
    hot = 4 * (31 + 1600 + 1200)
    assert all(rank.transport.bytes_sent - at >= hot for rank, at in zip(ranks.ranks, before, strict=True))


@pytest.mark.parametrize("seed", range(2))
def test_a_sparse_layer_leaves_the_layout_on_every_rank(seed: int):
    ranks = Simulation(LAYERS, policy(), 3, seed=seed, **RANDOM)
    gradients = ranks.gradients()
    gradients[1][2] = SPARSE
    outcome = ranks.step(gradients)
    assert outcome.result.sparse.tolist() == [False, False, True, False, False]
    ranks.step(ranks.gradients(absent=[2]))
    assert {p.ordering.sparse for p in ranks.pipelines} == {frozenset([2])}
    assert bucket_numbers(ranks, 2) == {()}


def test_all_layers_may_be_sparse():
    layers = [LayerSpec("a", (5,)), LayerSpec("b", (6,))]
    ranks = Simulation(layers, Identity(), 2)
    ranks.step([[SPARSE, SPARSE], [SPARSE, SPARSE]])
    outcome = ranks.step([[SPARSE, SPARSE], [SPARSE, SPARSE]])
    assert outcome.all_means() == [None, None]
    assert outcome.committed == [True, True]


# --- order --------------------------------------------------------------------------------------------------


def test_buckets_follow_the_order_in_which_rank_0s_gradients_arrived():
    ranks = Simulation(LAYERS, policy(), 3, **SMALL)
    arrivals = [4, 1, 0, 3, 2]
    ranks.step(order=arrivals)
    ranks.step(order=[0, 1, 2, 3, 4])  # only the first step counts
    ranks.step()
    assert [p.ordering.order for p in ranks.pipelines] == [arrivals] * 3
    for p in ranks.pipelines:
        seen = [layer for bucket in p.layout.buckets for layer in bucket.layers.tolist()]
        assert list(dict.fromkeys(seen)) == arrivals


@pytest.mark.parametrize("seed", range(2))
def test_ranks_agree_on_the_order_whatever_their_own(seed: int):
    ranks = Simulation(LAYERS, policy(), 3, seed=seed, **RANDOM)
    ranks.step(ranks.gradients(absent=[2]))
    orders = [p.ordering.order for p in ranks.pipelines]
    assert orders == [orders[0]] * 3
    assert sorted(orders[0]) == [0, 1, 2, 3, 4]


def test_an_order_that_is_none_is_refused():
    def twice(source: int, destination: int, message: np.ndarray) -> np.ndarray:
        if source == 0 and message.nbytes == 4 * len(LAYERS):
            message[:4] = message[4:8]
        return message

    ranks = Simulation(LAYERS, Identity(), 3, tamper=twice)
    errors = ranks.attempt()
    assert errors[0] is None
    assert [type(error) for error in errors[1:]] == [WireFormatError] * 2


# --- commit and discard -------------------------------------------------------------------------------------


def test_verbs_are_refused_in_the_wrong_phase():
    ranks = Simulation(LAYERS, Identity(), 1)
    (pipeline,) = ranks.pipelines
    for _ in range(2):  # before the first step, and when it was committed
        with pytest.raises(StateError):
            pipeline.commit()
        ranks.step()
    pipeline.open()
    for verb in (pipeline.commit, pipeline.open, pipeline.discard):
        with pytest.raises(StateError):
            verb()


def test_the_next_open_discards_what_was_not_committed():
    ranks = Simulation(LAYERS, FEEDBACK, 2, reorder=False, **SMALL)
    ranks.step()
    before = ranks.state()
    assert ranks.attempt() == [None, None]
    assert ranks.attempt() == [None, None]
    assert ranks.state() == before


def test_a_skipped_step_counts_as_one():
    ranks = Simulation(LAYERS, FEEDBACK, 2)
    gradients = ranks.gradients()
    gradients[0][0][0] = np.inf
    ranks.step(gradients)
    assert [(p.statistics.steps, p.statistics.skipped_steps, p.step) for p in ranks.pipelines] == [
        (1, 1, 1)
    ] * 2


@pytest.mark.parametrize(
    "submit",
    [lambda arrivals: arrivals.submit(Submission(0, 1, 1)), lambda arrivals: arrivals.submit_absent(0)],
)
def test_a_gradient_is_taken_once_and_in_an_open_step_only(submit):
    ranks = Simulation(LAYERS, Identity(), 1)
    (pipeline,) = ranks.pipelines

    def refused(text: str) -> None:
        with pytest.raises(StateError, match=text):
            submit(pipeline.arrivals)

    refused(r"a\.weight")  # before the first step
    ranks.step()
    refused(r"a\.weight")  # between steps
    pipeline.open()
    pipeline.arrivals.submit_absent(0)
    refused(r"'a\.weight' was submitted twice")
    (pipeline,) = Simulation(LAYERS, Identity(), 1).pipelines
    pipeline.open()
    pipeline.arrivals.flush()
    refused(r"'a\.weight' has a gradient after its step closed")


# --- construction -------------------------------------------------------------------------------------------


def construct(layers, plan, **settings) -> Pipeline:
    (transport,) = World(1).transports()
    return Pipeline(layers, plan, transport, Config(**settings), lambda layer: 0)


def test_without_layers_there_are_no_buckets():
    """As of a program that only makes requests between steps."""
    assert construct([], plan_for([], Identity())).layout.buckets == ()


TWICE = [LayerSpec("a", (3,)), LayerSpec("a", (4,))]
DOUBLE = [LayerSpec("double", (70,), "float64")]
LARGE = [LayerSpec("a", (4 * 16 * 70_000,))]
IMPOSSIBLE = {
    "layers of one name": (TWICE, plan_for(TWICE[:1], Identity()), {}, "more than once: a"),
    "other layers": (LAYERS, plan_for(LAYERS[1:], Identity()), {}, "does not fit"),
    "a codec for float64": (DOUBLE, plan_for([LayerSpec("double", (70,))], Quantize(4)), {}, "'double'"),
    "too many buckets": (LARGE, plan_for(LARGE, Identity()), {"slice_elements": 16}, "slice_elements"),
}


@pytest.mark.parametrize(("layers", "plan", "settings", "text"), IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_layers_and_plans_that_do_not_fit_are_refused(layers, plan, settings, text):
    with pytest.raises(ConfigError, match=text):
        construct(layers, plan, **settings)


# --- faults -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("victim", [0, 1, 3])
@pytest.mark.parametrize("seed", range(2))
def test_a_lost_rank_is_a_transport_error_on_all_others(victim: int, seed: int):
    ranks = Simulation(LAYERS, policy(), 4, seed=seed, **RANDOM)
    ranks.step()
    errors = ranks.attempt(dying=[victim])
    assert errors[victim] is None
    others = [error for rank, error in enumerate(errors) if rank != victim]
    assert [type(error) for error in others] == [TransportError] * 3


def test_a_stalled_rank_shows_where_the_others_wait():
    ranks = Simulation(LAYERS, policy(), 2, **SMALL)
    ranks.step()
    waiting, _ = ranks.ranks
    waiting.pipeline.open()
    waiting.pipeline.arrivals.flush()
    assert [waiting.pipeline.poll() for _ in range(3)] == [Waiting.WIRE] * 3
    assert waiting.pipeline.position == (1, 0, 0)


# --- statistics ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [0, 2])
def test_statistics_are_reduced_every_so_many_steps_or_never(every: int):
    ranks = Simulation(LAYERS, policy(), 3, **RANDOM, statistics_every_steps=every)
    seen = []
    for _ in range(5):
        ranks.step()
        seen.append([p.reduced_statistics for p in ranks.pipelines])
    if not every:
        assert seen == [[None] * 3] * 5
        return
    assert seen[0] == [None] * 3
    assert [[s.steps for s in row] for row in seen[1:]] == [[2] * 3, [2] * 3, [4] * 3, [4] * 3]
    for row in seen[1:]:
        assert row == [row[0]] * 3
    assert seen[-1][0].wire_bytes > 0
    assert seen[-1][0].codec_seconds > 0


def test_the_ratio_counts_headers_scales_and_exact_layers():
    layers = [LayerSpec("w", (64, 64)), LayerSpec("b", (64,), kind="bias")]
    ranks = Simulation(layers, Policy(Quantize(4, 512)), 2, reorder=False)
    for _ in range(3):
        ranks.step()
    payload = 8 * (4096 // 512) + 4096 // 2 + 4 * 64
    # Of both halves of two rounds, one travels; none needs padding.
    sent = 3 * (payload + 2 * ByteHeader.size(2))
    assert sum(p.statistics.wire_bytes for p in ranks.pipelines) == 2 * sent
    assert ranks.pipelines[0].statistics.dense_bytes == 3 * 4 * (4096 + 64)


def test_the_trace_has_every_stage_of_every_bucket():
    ranks = Simulation(LAYERS, FEEDBACK, 2, reorder=False, **SMALL)
    ranks.step()
    pipeline = ranks.pipelines[0]
    buckets = range(len(pipeline.layout.buckets))
    for name in ("ready", "compress", "send", "reduce", "decompress"):
        assert {span.bucket for span in pipeline.trace.spans() if span.name == name} == set(buckets)
