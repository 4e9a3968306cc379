"""Servers that do not train: the means are those of the others without them, byte for byte, and nothing is lost."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from configurations import ROWS
from hypothesis import given
from hypothesis import strategies as st
from reduce.schemes import Model, compressors, layer_lists, one_bucket, topologies, with_residuals
from tiers import examples

from gradcomp import (
    Cast,
    ConfigError,
    GradcompError,
    Identity,
    LayerSpec,
    OneBit,
    PlanMismatchError,
    PowerSGD,
    Quantize,
    Signum,
    TopK,
    TransportError,
    WireFormatError,
)
from gradcomp.control.candidates import sent_bytes
from gradcomp.core.scheme import Scheme, parse
from gradcomp.core.topology import Topology
from gradcomp.reduce import make
from gradcomp.reduce.costs import cost, load_of
from gradcomp.reduce.header import READY, ByteHeader, padded
from gradcomp.reduce.model import Load
from gradcomp.testing.simulation import SPARSE, Simulation, plan_for, random_gradients, same_bytes, true_mean

LAYERS = [
    LayerSpec("empty", (0,)),
    LayerSpec("half", (129,), "float16"),
    LayerSpec("odd", (17, 18)),
    LayerSpec("brain", (64,), "bfloat16"),
    LayerSpec("last", (5,)),
]
HALF, ODD = 1, 2

#: (ranks, servers of them)
SIZES = [(2, 1), (3, 1), (3, 2), (4, 1), (4, 2), (7, 1), (7, 2), (7, 4)]
every_size = pytest.mark.parametrize(("world", "servers"), SIZES)


def scheme(servers: int) -> str:
    return f"parameter_server:servers={servers},dedicated=true"


class Served(Simulation):
    """A simulation whose first ranks only serve: gradients are given, and what is owed counted, without them."""

    def __init__(self, layers, compression, world: int, servers: int, **options) -> None:
        self.servers = servers
        options.setdefault("topology", Topology(tuple(r // 2 for r in range(world))))
        super().__init__(layers, compression, world, reduction=scheme(servers), **options)

    def gradients(self, absent=(), size: float = 1.0):
        self.drawn += 1
        drawn = random_gradients(self.layers, self.size - self.servers, seed=self.drawn, size=size)
        return [[None if i in absent else g for i, g in enumerate(rank)] for rank in drawn]

    def attempt(self, gradients=None, **options):
        gradients = self.gradients() if gradients is None else gradients
        return super().attempt([[None] * len(self.layers)] * self.servers + gradients, **options)

    def owed(self, layer: int) -> np.ndarray:
        """Mean of the first residuals, of servers too where they wait to be handed over, and the second ones."""
        total = np.zeros(self.layers[layer].size)
        for pipeline in self.pipelines:
            first = pipeline.residuals.first.value(layer)
            if first.size:
                total += first.astype(np.float64) / (self.size - self.servers)
            for row, owned in enumerate(pipeline.residuals.ranges):
                if owned.layer == layer:
                    total[owned.start : owned.end] += pipeline.residuals.second.value(row)
        return total


def equal(some, others) -> bool:
    return all(same_bytes(a, b) for a, b in zip(some, others, strict=True))


# --- the mean -----------------------------------------------------------------------------------------------


@examples(30)
@given(
    layers=layer_lists,
    compressor=compressors | with_residuals | st.just(Identity()),
    size=st.sampled_from(SIZES),
    cap=st.sampled_from([40, 200, 10**6]),
    overlap=st.booleans(),
    shuffle=st.booleans(),
    data=st.data(),
)
def test_the_mean_is_that_of_the_scheme_among_those_who_train(
    layers, compressor, size, cap: int, overlap: bool, shuffle: bool, data
):
    """The model has no servers at all: neither means nor residuals, nor random draws, show that there are any."""
    if isinstance(compressor, Identity):  # what is not bfloat16 takes an allreduce
        layers = [LayerSpec(layer.name, layer.shape, "bfloat16") for layer in layers]
    world, servers = size
    topology = data.draw(st.sampled_from(topologies(world)))
    options = {"slice_elements": cap, "overlap": overlap, "reorder": False}
    ranks = Served(layers, compressor, world, servers, topology=topology, shuffle=shuffle, **options)
    model = Model("sra", Simulation(layers, compressor, world - servers, **options), compressor)
    for _ in range(3):
        gradients = ranks.gradients()
        assert equal(ranks.step(gradients).all_means(), model.step(gradients))
    if compressor.traits.keeps_residual:
        for rank, pipeline in enumerate(ranks.pipelines):
            for i in range(len(layers)):
                first = pipeline.residuals.first.value(i)
                if rank >= servers:
                    assert same_bytes(first, model.first[rank - servers][i])
                else:
                    assert not first.any()
            for row, owned in enumerate(pipeline.residuals.ranges):
                value = model.second[owned.layer][owned.start : owned.end]
                assert same_bytes(pipeline.residuals.second.value(row), value)
            assert rank < servers or not pipeline.residuals.ranges


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if not row.by_part])
@pytest.mark.parametrize(("world", "servers"), [(3, 1), pytest.param(5, 2, marks=pytest.mark.full)])
def test_every_compressor_works_as_if_there_were_no_servers(name: str, world: int, servers: int):
    """Codes, sums and what is gathered; leaders of a broadcast are among those who train."""
    row = ROWS[name]
    options = {"slice_elements": 150, "reorder": False}
    alone = Simulation(LAYERS, row.compressor, world - servers, topology=None, **options)
    served = Served(LAYERS, row.compressor, world, servers, **options)
    for _ in range(4):
        gradients = served.gradients()
        assert equal(served.step(gradients).all_means(), alone.step(gradients).all_means())


@every_size
def test_sums_are_divided_by_those_who_train(world: int, servers: int):
    """And not at all where the user asked for sums."""
    trainers = world - servers
    for compressor in (Identity(), Cast("float32")):
        means, sums = (Served(LAYERS, compressor, world, servers, average=a) for a in (True, False))
        gradients = means.gradients()
        for gradient in gradients:
            gradient[ODD] = np.round(100 * gradient[ODD])  # whole: no order of addition matters
        total = sum(gradient[ODD] for gradient in gradients)
        np.testing.assert_array_equal(means.step(gradients).mean(ODD), total / np.float32(trainers))
        np.testing.assert_allclose(sums.step(gradients).mean(ODD), total, rtol=1e-6)


def test_one_trainer_gets_its_own_gradient_back():
    ranks = Served(LAYERS, Quantize(8), 3, 2)
    (gradient,) = gradients = ranks.gradients()
    np.testing.assert_allclose(ranks.step(gradients).mean(ODD), gradient[ODD], atol=0.05)


# --- residuals ----------------------------------------------------------------------------------------------


@every_size
@pytest.mark.parametrize("compressor", [OneBit(50), Quantize(2, 33, rounding="nearest")], ids=str)
def test_error_feedback_telescopes_while_chunks_change_hands(world: int, servers: int, compressor):
    """A new order of the buckets, layers that nobody has for a while, and a change of plan: servers hand over."""
    layers = [LayerSpec("w", (301,)), LayerSpec("v", (64,)), LayerSpec("u", (90,))]
    ranks = Served(layers, compressor, world, servers, slice_elements=100, cold_after_steps=2)
    plans = [
        plan_for(layers, other, 1 + i) for i, other in enumerate([Quantize(3, 20, feedback=True), compressor])
    ]
    missing = [np.zeros(layer.size) for layer in layers]
    sizes = []
    for step in range(24):
        if step in (12, 16):
            for pipeline in ranks.pipelines:
                pipeline.propose(plans[step // 16])
        gradients = ranks.gradients(absent=[0] if 4 <= step < 8 else [])
        means = ranks.step(gradients, order=[0, 2, 1]).all_means()
        for i, mean in enumerate(means):
            if mean is not None:
                missing[i] += true_mean(gradients, i) - mean.astype(np.float64)
            owed = ranks.owed(i)
            np.testing.assert_allclose(missing[i], owed, rtol=0, atol=4e-6 * max(1.0, np.abs(owed).max()))
        sizes.append(np.linalg.norm(ranks.owed(0)))
    assert sizes[-1] < 3 * max(sizes[:4])
    assert [p.plan.version for p in ranks.pipelines] == [2] * world


@every_size
@pytest.mark.parametrize("next_one", [TopK(0.1), PowerSGD(2)], ids=str)
def test_what_servers_held_goes_to_a_trainer_where_no_server_owns_it_any_more(
    world: int, servers: int, next_one
):
    layers = [LayerSpec("w", (20, 30)), LayerSpec("v", (12, 14))]
    ranks = Served(layers, Quantize(2, 33, rounding="nearest"), world, servers, slice_elements=100)
    missing = [np.zeros(layer.size) for layer in layers]
    for step in range(6):
        if step == 2:
            for pipeline in ranks.pipelines:
                pipeline.propose(plan_for(layers, next_one, 1))
        gradients = ranks.gradients()
        for i, mean in enumerate(ranks.step(gradients).all_means()):
            missing[i] += true_mean(gradients, i) - mean.astype(np.float64)
            np.testing.assert_allclose(missing[i], ranks.owed(i), rtol=0, atol=2e-5)
    for pipeline in ranks.pipelines[:servers]:
        assert not pipeline.residuals.ranges
        assert not any(pipeline.residuals.first.value(i).any() for i in range(len(layers)))


# --- votes --------------------------------------------------------------------------------------------------


@every_size
@pytest.mark.parametrize("compressor", [Quantize(3, 20, feedback=True), TopK(0.1), PowerSGD(2)], ids=str)
def test_the_first_trainers_order_becomes_that_of_the_buckets(world: int, servers: int, compressor):
    ranks = Served(LAYERS, compressor, world, servers, slice_elements=50)
    ranks.step(order=[2, 4, 0, 1, 3])
    assert [p.ordering.order for p in ranks.pipelines] == [ranks.pipelines[servers].registry.arrivals] * world


@every_size
@pytest.mark.parametrize("compressor", [Quantize(4, 32), TopK(0.1), PowerSGD(2)], ids=str)
def test_a_plan_takes_over_when_all_trainers_hold_it(world: int, servers: int, compressor):
    ranks = Served(LAYERS, compressor, world, servers, slice_elements=200, shuffle=True, delay=0.1)
    plan = plan_for(LAYERS, Quantize(6, 32), 1)
    for pipeline in ranks.pipelines:
        ranks.step()
        assert [p.plan.version for p in ranks.pipelines] == [0] * world
        pipeline.propose(plan)
    ranks.step()
    assert [p.plan.version for p in ranks.pipelines] == [1] * world
    ranks.step().all_means()


@every_size
@pytest.mark.parametrize("compressor", [Quantize(4, 32, feedback=True), TopK(0.1), Identity()], ids=str)
def test_what_one_trainer_has_or_has_not_is_known_to_all(world: int, servers: int, compressor):
    trainers = world - servers
    for present in range(trainers):
        ranks = Served(LAYERS, compressor, world, servers)
        gradients = ranks.gradients(absent=[ODD])
        gradients[present][ODD] = np.ones(LAYERS[ODD].size, np.float32)
        gradients[present][HALF] = SPARSE
        outcome = ranks.step(gradients)
        assert outcome.result.present[ODD]
        assert outcome.result.sparse.tolist() == [i == HALF for i in range(len(LAYERS))]
        assert outcome.mean(ODD).any()
        outcome = ranks.step(ranks.gradients(absent=[ODD, HALF]))
        assert [means[ODD] for means in outcome.means] == [None] * world
        bad = ranks.gradients(absent=[HALF])
        bad[present][ODD][7] = np.nan
        outcome = ranks.step(bad)
        assert outcome.result.nonfinite.tolist() == [i == ODD for i in range(len(LAYERS))]
        assert outcome.committed == [False] * world


# --- bytes --------------------------------------------------------------------------------------------------


@every_size
@pytest.mark.parametrize("compressor", [Quantize(3, 20), Quantize(3, 20, feedback=True), Signum(32)], ids=str)
def test_bytes_are_those_of_the_formula_and_servers_send_nothing_first(world: int, servers: int, compressor):
    layers = [LayerSpec("a", (700,)), LayerSpec("b", (33,)), LayerSpec("c", (0,))]
    for topology in topologies(world):
        sent: list[tuple[int, int, int]] = []
        ranks = Served(
            layers,
            compressor,
            world,
            servers,
            topology=topology,
            reorder=False,
            tamper=lambda source, to, message, sent=sent: (sent.append((source, to, len(message))), message)[
                1
            ],
        )
        ranks.step()
        parts = one_bucket(layers, plan_for(layers, compressor))
        formula = cost(parse(scheme(servers)), load_of(parse(scheme(servers)), parts, len(layers)), topology)
        built = [make(scheme(servers), parts, len(layers), rank, topology) for rank in range(world)]
        want = formula.bytes_sent().tolist()
        assert [reduction.bytes_sent for reduction in built] == want
        assert [pipeline.transport.bytes_sent for pipeline in ranks.pipelines] == want
        up = [(source, to) for source, to, _ in sent[: servers * (world - servers)]]
        assert set(up) == {(source, to) for source in range(servers, world) for to in range(servers)}
        down = [(source, to) for source, to, _ in sent[len(up) :]]
        assert set(down) == {(source, to) for source in range(servers) for to in range(world) if to != source}
        assert len(down) == len(set(down))
        for rank in range(world):
            assert sum(n for _, to, n in sent if to == rank) == sum(
                (flow.received + flow.received_inside)[rank] for flow in formula.flows
            )


@every_size
def test_bytes_of_even_chunks_are_those_of_the_page(world: int, servers: int):
    d = 1_440_000.0
    one = cost(parse(scheme(servers)), Load(d, 8 * d), Topology(tuple(range(world))))
    own = (world - 1) * d / servers
    np.testing.assert_allclose(one.bytes_sent(), [own] * servers + [d] * (world - servers))
    received = sum(flow.received for flow in one.flows)
    of_server = (world - servers) * d / servers + (servers - 1) * d / servers
    np.testing.assert_allclose(received, [of_server] * servers + [d] * (world - servers))
    assert (one.encoded, one.decoded) == (1 + 1 / servers, (world - servers) / servers + 1)


@every_size
def test_what_is_gathered_comes_from_trainers_only(world: int, servers: int):
    layers = [LayerSpec("a", (700,))]
    ranks = Served(layers, TopK(0.1, zeros=True), world, servers, reorder=False)
    ranks.step()
    (bucket,) = ranks.pipelines[0].layout.buckets
    header = ByteHeader.size(1) * (world - 1)
    payload = bucket.payload_bytes * (world - 1)
    sent = [pipeline.transport.bytes_sent - header for pipeline in ranks.pipelines]
    assert sent == [0] * servers + [padded(bucket.payload_bytes) * (world - 1)] * (world - servers)
    sent[servers:] = [payload] * (world - servers)
    predicted = sent_bytes(bucket.groups[0], parse(scheme(servers)), Topology.one_host(world)).sum()
    assert predicted == pytest.approx(np.mean(sent))
    assert ranks.pipelines[0].predicted.sum() == pytest.approx(predicted)


# --- what cannot be -----------------------------------------------------------------------------------------


def test_the_setting_is_read_and_written():
    for text, servers, dedicated in [
        ("parameter_server", 1, False),
        ("parameter_server:servers=2", 2, False),
        ("parameter_server:dedicated=true", 1, True),
        ("parameter_server:servers=2,dedicated=true", 2, True),
    ]:
        assert parse(text) == Scheme("parameter_server", servers, dedicated)
        assert str(parse(text)) == text
    assert parse("parameter_server:dedicated=false,servers=3") == Scheme("parameter_server", 3)
    for text in (
        "sra:dedicated=true",
        "parameter_server:dedicated=yes",
        "parameter_server:dedicated",
        "parameter_server:servers=1,servers=2",
        "parameter_server:servers=0,dedicated=true",
        "parameter_server:servers=1,",
        "parameter_server:",
    ):
        with pytest.raises(ConfigError, match=r"parameter_server has options|dedicated must|servers must"):
            parse(text)


@pytest.mark.parametrize(("world", "servers"), [(2, 2), (3, 3), (3, 5)])
def test_somebody_must_be_left_to_train(world: int, servers: int):
    with pytest.raises(ConfigError, match=f"needs 1 to {world - 1} dedicated servers among {world} ranks"):
        Simulation(LAYERS, Quantize(4), world, reduction=scheme(servers))


def test_a_rank_alone_trains():
    ranks = Simulation(LAYERS, Quantize(8), 1, reduction=scheme(1))
    gradients = ranks.gradients()
    np.testing.assert_allclose(ranks.step(gradients).mean(ODD), gradients[0][ODD], atol=0.05)


# --- damaged messages ---------------------------------------------------------------------------------------

WORLD, SERVERS = 4, 2
PAIR = [LayerSpec("a", (300,)), LayerSpec("b", (100,))]
HEADER = ByteHeader.size(len(PAIR))

Change = Callable[[np.ndarray], np.ndarray]


def damaged(number: int, change: Change, compressor=None) -> tuple[list[Exception | None], list[int]]:
    """Every rank's error where message ``number`` of a step is changed, and who got which message."""
    receivers: list[int] = []

    def tamper(source: int, destination: int, message: np.ndarray) -> np.ndarray:
        receivers.append(destination)
        return change(message.copy()) if len(receivers) - 1 == number else message

    return Served(
        PAIR,
        compressor or Quantize(4, 50),
        WORLD,
        SERVERS,
        tamper=tamper,
        reorder=False,
    ).attempt(), receivers


#: Trainers to servers, then servers to all others.
MESSAGES = range(SERVERS * (WORLD - SERVERS) + SERVERS * (WORLD - 1))


def test_a_step_has_these_messages():
    assert len(damaged(-1, lambda message: message)[1]) == len(MESSAGES)


@pytest.mark.parametrize("number", MESSAGES)
def test_a_message_of_another_length_is_an_error_on_every_rank(number: int):
    for change in (
        lambda m: m[:0],
        lambda m: m[:HEADER],
        lambda m: m[:-1],
        lambda m: np.append(m, np.uint8(0)),
    ):
        errors, _ = damaged(number, change)
        assert all(isinstance(error, TransportError) for error in errors), errors


@pytest.mark.parametrize("number", MESSAGES)
@pytest.mark.parametrize(
    ("at", "kind"),
    [(0, WireFormatError), (3, WireFormatError), (4, PlanMismatchError), (8, WireFormatError),
     (14, WireFormatError), (22, WireFormatError), (32, WireFormatError)],
    ids=["magic", "round", "check", "step", "chunk", "sender", "state"],
)  # fmt: skip
def test_a_wrong_header_is_noticed_where_it_arrives(number: int, at: int, kind: type):
    def change(message: np.ndarray) -> np.ndarray:
        message[at] ^= 0x40
        return message

    errors, receivers = damaged(number, change)
    assert type(errors[receivers[number]]) is kind
    others = [error for rank, error in enumerate(errors) if rank != receivers[number]]
    assert all(error is None or isinstance(error, TransportError | kind) for error in others), errors


def test_servers_that_disagree_on_the_ranks_are_refused():
    down = SERVERS * (WORLD - SERVERS)

    def change(message: np.ndarray) -> np.ndarray:
        message[32 + len(PAIR)] |= READY
        return message

    errors, receivers = damaged(down, change)
    assert isinstance(errors[receivers[down]], WireFormatError)
    assert "disagree on which ranks are ready" in str(errors[receivers[down]])


@pytest.mark.parametrize("compressor", [Quantize(4, 50, feedback=True), TopK(0.1), PowerSGD(2)], ids=str)
@examples(15)
@given(data=st.data())
def test_random_bytes_are_a_typed_error_or_leave_the_others_alive(compressor, data):
    count = len(damaged(-1, lambda message: message, compressor)[1])
    number = data.draw(st.integers(0, max(count - 1, 0)))
    noise = np.frombuffer(data.draw(st.binary(min_size=1, max_size=40)), np.uint8)
    at = data.draw(st.integers(0, 100))

    def change(message: np.ndarray) -> np.ndarray:
        room = message[at : at + len(noise)]
        room[:] = noise[: len(room)]
        return message

    errors, _ = damaged(number, change, compressor)
    assert all(error is None or isinstance(error, GradcompError) for error in errors)


@pytest.mark.parametrize("gone", range(WORLD))
@pytest.mark.parametrize("seed", range(3))
def test_a_rank_that_leaves_at_any_time_never_makes_the_others_hang(gone: int, seed: int):
    ranks = Served(
        PAIR,
        Quantize(4, 50, feedback=True),
        WORLD,
        SERVERS,
        seed=seed,
        shuffle=True,
        delay=0.3,
        slice_elements=120,
    )
    ranks.step()
    errors = ranks.attempt(dying=[gone])
    assert all(error is None or isinstance(error, GradcompError) for error in errors)


@pytest.mark.parametrize("sender", range(SERVERS, WORLD))
def test_an_impossible_payload_is_blamed_on_its_rank(sender: int):
    def tamper(source: int, destination: int, message: np.ndarray) -> np.ndarray:
        if source == sender and len(message) > HEADER + 16:
            message[HEADER : HEADER + 4] = 0xFF  # the first count
        return message

    errors = Served(PAIR, TopK(0.1), WORLD, SERVERS, tamper=tamper, checksums=False, reorder=False).attempt()
    assert {type(error) for rank, error in enumerate(errors) if rank != sender} == {WireFormatError}
    assert {str(error)[:11] for rank, error in enumerate(errors) if rank != sender} == {f"rank {sender} sent"}
