"""Compares the rounds and bytes of formulas with what is built and what is sent, for up to 1,024 ranks."""

from __future__ import annotations

import math
import tracemalloc
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reduce.schemes import REDUCTIONS, compressors, fits, layer_lists, one_bucket, servers_of, topologies
from tiers import examples

from gradcomp import Identity, LayerSpec, Quantize, Signum
from gradcomp.core.scheme import Scheme, names, parse
from gradcomp.core.topology import Topology
from gradcomp.kernels.codec import Draw
from gradcomp.kernels.step import StepContext
from gradcomp.reduce import make
from gradcomp.reduce.base import framed
from gradcomp.reduce.costs import OVERLAP, cheapest, cost, load_of, predict, predict_step
from gradcomp.reduce.header import APPLIED, PRESENT, WAITING, BucketFlags, HeaderId, Headers
from gradcomp.reduce.model import Cost, Load, Network
from gradcomp.testing.simulation import Simulation, plan_for
from gradcomp.transport.base import AllGather, AllToAll, Exchange
from gradcomp.transport.inprocess import World

every_reduction = pytest.mark.parametrize("reduction", REDUCTIONS)
NETWORK = Network(alpha=1e-4, beta=1e-8, encode_rate=2e9, decode_rate=4e9)


def flat(world: int) -> Topology:
    """Returns a topology with a host for every rank."""
    return Topology(tuple(range(world)))


# --- what is built ------------------------------------------------------------------------------------------


@every_reduction
@examples(40)
@given(layer_lists, compressors | st.just(Identity()), st.integers(1, 9), st.data())
def test_what_is_built_says_what_the_formulas_say(reduction: str, layers, compressor, world: int, data):
    if not fits(reduction, world):
        return
    if isinstance(compressor, Identity):
        layers = [LayerSpec(layer.name, layer.shape, "bfloat16") for layer in layers]
    topology = data.draw(st.sampled_from(topologies(world) if world <= 7 else [flat(world)]))
    parts = one_bucket(layers, plan_for(layers, compressor))
    formula = cost(parse(reduction), load_of(parse(reduction), parts, len(layers)), topology)
    built = [make(reduction, parts, len(layers), rank, topology) for rank in range(world)]
    assert [r.rounds for r in built] == [formula.rounds] * world
    assert [r.bytes_sent for r in built] == bytes_by_rank(formula, world)


def bytes_by_rank(formula: Cost, world: int) -> list[int]:
    """Returns whole numbers, since the formulas are exact."""
    if not formula.flows:
        return [0] * world
    values = formula.bytes_sent()
    assert (values == np.round(values)).all()
    return [int(v) for v in values]


# --- what travels -------------------------------------------------------------------------------------------


class Watch:
    """Counts bytes by round, way, rank, and whether they stay on the host."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.seen: list[Counter] = []
        self.world: World | None = None

    def __call__(self, source: int, destination: int, message: np.ndarray) -> np.ndarray:
        while len(self.seen) <= len(self.world._finished):
            self.seen.append(Counter())
        inside = self.topology.hosts[source] == self.topology.hosts[destination]
        self.seen[-1][("sent", inside, source)] += len(message)
        self.seen[-1][("received", inside, destination)] += len(message)
        return message


@every_reduction
@pytest.mark.parametrize("world", [2, 3, 4, 5, 7, 64])
def test_every_message_of_every_round_is_in_the_formula(reduction: str, world: int):
    """Bytes are counted by round and rank, to and from other hosts and inside the rank's own."""
    layers = [LayerSpec("a", (700,)), LayerSpec("b", (33,)), LayerSpec("c", (0,))]
    for topology in topologies(world) if world <= 7 else [Topology(tuple(r // 4 for r in range(world)))]:
        watch = Watch(topology)
        options = {"reduction": reduction, "topology": topology, "reorder": False}
        ranks = Simulation(layers, Quantize(3, 20), world, tamper=watch, **options)
        watch.world = ranks.world
        ranks.step()
        (bucket,) = ranks.pipelines[0].layout.buckets
        parts = one_bucket(layers, plan_for(layers, Quantize(3, 20)))
        formula = cost(parse(reduction), load_of(parse(reduction), parts, len(bucket.layers)), topology)
        assert [p.transport._number for p in ranks.pipelines] == [formula.rounds] * world
        assert [p.transport.bytes_sent for p in ranks.pipelines] == bytes_by_rank(formula, world)
        for number, flow in enumerate(formula.flows):
            columns = {
                ("sent", False): flow.sent,
                ("sent", True): flow.sent_inside,
                ("received", False): flow.received,
                ("received", True): flow.received_inside,
            }
            for (way, inside), values in columns.items():
                got = [watch.seen[number][(way, inside, rank)] for rank in range(world)]
                assert got == values.tolist(), (number, way, inside)


# --- the formulas -------------------------------------------------------------------------------------------

D, DENSE = 1_440_000.0, 11_520_000.0


def ideal(reduction: str, world: int) -> list[float]:
    """Returns payload bytes by rank for equal chunks, by the formulas of docs/algorithms.md."""
    name, servers = reduction.partition(":")[0], servers_of(reduction)
    if name in ("sra", "ring", "hierarchical"):  # the latter with a host for every rank
        return [2 * D * (world - 1) / world] * world
    if name == "all_to_all":
        return [D * (world - 1)] * world
    if name == "gather":
        return [DENSE * (world - 1)] + [D] * (world - 1)
    if name == "tree":
        below = [sum(p == r for p in (q & (q - 1) for q in range(1, world))) for r in range(world)]
        return [D * (n + (r > 0)) for r, n in enumerate(below)]
    owned = D / servers
    return [D - owned + (world - 1) * owned if r < servers else D for r in range(world)]


@every_reduction
@pytest.mark.parametrize("world", [2, 3, 4, 5, 8, 15, 16])
def test_bytes_of_even_chunks_are_those_of_the_page(reduction: str, world: int):
    got = cost(parse(reduction), Load(D, DENSE), flat(world)).bytes_sent()
    np.testing.assert_allclose(got, ideal(reduction, world), rtol=1e-12)


@pytest.mark.parametrize(("hosts", "of_each"), [(2, 2), (4, 8), (3, 5)])
def test_bytes_of_two_levels_are_those_of_the_page(hosts: int, of_each: int):
    topology = Topology(tuple(h for h in range(hosts) for _ in range(of_each)))
    got = cost(Scheme("hierarchical"), Load(D, DENSE), topology).bytes_sent().reshape(hosts, of_each)
    np.testing.assert_allclose(got[:, 0], 2 * D * (hosts - 1) / hosts + D * (of_each - 1))
    np.testing.assert_allclose(got[:, 1:], DENSE)


def test_the_link_of_a_host_carries_half_of_it_with_two_levels_of_two():
    """On two hosts of two ranks, a flat scatter sends twice as many bytes from host to host."""
    topology = Topology((0, 0, 1, 1))

    def across(name: str) -> float:
        flows = cost(Scheme(name), Load(D, DENSE), topology).flows
        return sum(flow.sent[:2].sum() for flow in flows)

    assert across("sra") == 2 * D
    assert across("hierarchical") == D


@every_reduction
@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 8, 13, 16, 1024])
def test_rounds_are_those_of_the_page(reduction: str, world: int):
    want = {"ring": 2 * (world - 1), "tree": 2 * math.ceil(math.log2(world)), "all_to_all": 1}
    name = reduction.partition(":")[0]
    if fits(reduction, world):
        got = cost(parse(reduction), Load(D, DENSE), flat(world)).rounds
        assert got == (want.get(name, 2) if world > 1 else 0)


def test_encodes_on_the_longest_path_are_those_of_the_page():
    def encodes(name: str, world: int) -> int:
        return cost(Scheme(name), Load(D, DENSE), flat(world)).encodes

    for world in (2, 3, 4, 8, 13):
        assert (
            encodes("sra", world) == encodes("parameter_server", world) == encodes("hierarchical", world) == 2
        )
        assert encodes("all_to_all", world) == encodes("gather", world) == 1
        assert encodes("ring", world) == world
    assert [encodes("tree", world) for world in (2, 3, 4, 6, 8, 16, 1024)] == [2, 2, 3, 3, 4, 5, 11]


def test_the_page_has_every_reduction():
    page = (Path(__file__).resolve().parents[2] / "docs" / "algorithms.md").read_text()
    table = page.split("|---|", 1)[1].split("\n\n", 1)[0]
    rows = [line.split("`")[1].partition(":")[0] for line in table.splitlines() if line.startswith("| `")]
    assert tuple(rows) == names()


# --- time ---------------------------------------------------------------------------------------------------


def test_time_is_rounds_bytes_and_coding():
    load, world = Load(D, DENSE), 4
    coding = DENSE * (1 + 1 / world) / NETWORK.encode_rate + DENSE * 2 / NETWORK.decode_rate
    wire = 2 * (NETWORK.alpha + NETWORK.beta * D * 3 / 4)
    assert predict(Scheme("sra"), load, flat(world), NETWORK) == pytest.approx(wire + coding)
    ring = 6 * (NETWORK.alpha + NETWORK.beta * D / 4)
    coding = DENSE / NETWORK.encode_rate + DENSE * 1.75 / NETWORK.decode_rate
    assert predict(Scheme("ring"), load, flat(world), NETWORK) == pytest.approx(ring + coding)


@pytest.mark.parametrize(
    ("reduction", "topology", "encoded", "decoded"),
    [
        ("sra", flat(8), 1 + 1 / 8, 2),
        ("ring", flat(8), 1, 1 + 7 / 8),
        ("tree", flat(8), 4, 1 + 3 + (0 + 1 + 2)),  # the root's children, and those of ranks 4, 6 and 7
        ("tree", flat(5), 4, 1 + 3 + (0 + 1 + 0)),  # rank 4 has none
        ("all_to_all", flat(8), 1, 9),
        ("gather", flat(8), 1, 9),
        ("parameter_server:servers=2", flat(8), 1 + 1 / 2, 5),
        ("hierarchical", flat(8), 1 + 1 / 8, 2),
        ("hierarchical", Topology((0, 0, 0, 1, 1, 1, 1, 1)), 1 + 1 / 2, 2 + 5),
    ],
)
def test_coding_one_after_the_other_is_that_of_the_page(
    reduction: str, topology: Topology, encoded: float, decoded: float
):
    one = cost(parse(reduction), Load(D, DENSE), topology)
    assert (one.encoded, one.decoded) == pytest.approx((encoded, decoded))


def test_the_order_of_reductions_in_markov_2024():
    """In table 3.4, for 8 ranks, SRA is faster than the ring, and the ring faster than the tree."""
    seconds = [predict(Scheme(name), Load(D, DENSE), flat(8), NETWORK) for name in ("sra", "ring", "tree")]
    assert seconds == sorted(seconds)


@every_reduction
@pytest.mark.parametrize("topology", [flat(2), flat(8), Topology((0, 0, 1, 1, 1))], ids=str)
def test_a_step_of_one_bucket_takes_what_the_bucket_takes(reduction: str, topology: Topology):
    if not fits(reduction, topology.world):
        return
    network = Network(1e-4, 1e-8, 2e9, 4e9, 1e-6, 1e-10, overhead=1e-3)
    alone = predict(parse(reduction), Load(D, DENSE, 64), topology, network)
    assert predict_step(parse(reduction), Load(D, DENSE, 64), 1, topology, network) == pytest.approx(alone)


def test_a_step_of_many_buckets_fills_the_link():
    """Latencies overlap, and the overhead of the rounds that are under way together does not."""
    network, world, buckets = Network(1e-3, 1e-8, 2e9, 4e9, overhead=1e-4), 4, 16
    coding = buckets * DENSE * (1.25 / network.encode_rate + 2 / network.decode_rate)
    sra = 17 * network.alpha + 15 * network.overhead + buckets * network.beta * 2 * D * 3 / 4
    found = predict_step(Scheme("sra"), Load(D, DENSE), buckets, flat(world), network)
    assert found == pytest.approx(sra + coding)
    coding = buckets * DENSE * (1 / network.encode_rate + 1.75 / network.decode_rate)
    ring = 21 * network.alpha + (6 * 16 - 21) * network.overhead + buckets * network.beta * 6 * D / 4
    found = predict_step(Scheme("ring"), Load(D, DENSE), buckets, flat(world), network)
    assert found == pytest.approx(ring + coding)


def test_rounds_with_different_busiest_links_overlap_in_part():
    network, buckets = Network(0.0, 1e-8, math.inf, math.inf), 16
    seconds = network.beta * 3 * D  # of one round through the server's link, in or out
    found = predict_step(Scheme("parameter_server"), Load(D, DENSE), buckets, flat(4), network)
    assert found == pytest.approx((2 * buckets - OVERLAP * (buckets - 1)) * seconds)


def test_a_large_ring_is_predicted_at_once():
    assert predict_step(Scheme("ring"), Load(D, DENSE), 100, flat(1024), NETWORK) > 0


def bucket_of(elements: int, compressor=None):
    layers = [LayerSpec("w", (elements,))]
    return one_bucket(layers, plan_for(layers, compressor or Quantize(4, 512)))


@pytest.mark.parametrize(
    ("elements", "topology", "network", "choice"),
    [
        (1 << 20, Topology.one_host(8), None, "sra"),
        (1 << 20, flat(8), NETWORK, "sra"),
        (64, flat(8), NETWORK, "all_to_all"),  # one round instead of two
        (1 << 20, Topology((0,) * 4 + (1,) * 4), Network(1e-4, 8e-8, 2e9, 4e9, 1e-6, 1e-11), "hierarchical"),
        (1 << 20, flat(2), Network(1e-4, 1e-8, math.inf, math.inf), "all_to_all"),  # one round, as many bytes
        (1 << 20, flat(4), Network(0.0, 0.0, math.inf, math.inf), "sra"),  # among equals
    ],
)
def test_auto_takes_the_cheapest(elements: int, topology: Topology, network: Network | None, choice: str):
    assert cheapest(bucket_of(elements), 1, topology, network) == Scheme(choice)


def test_auto_counts_the_buckets_of_the_step():
    """A ring decodes less, and pays for more rounds as soon as others are under way."""
    network = Network(0.0, 1e-8, math.inf, 1e9, overhead=1e-3)
    parts = bucket_of(1 << 20)
    ring, sra = (
        [predict_step(Scheme(name), load_of(Scheme(name), parts, 1), n, flat(4), network) for n in (1, 16)]
        for name in ("ring", "sra")
    )
    assert ring[0] < sra[0]
    assert ring[1] > sra[1]
    assert [cheapest(parts, 1, flat(4), network, n).name for n in (1, 16)] == ["ring", "sra"]


def test_auto_leaves_out_what_a_codec_does_not_allow():
    topology = Topology((0,) * 4 + (1,) * 4)
    local = Network(1e-4, 1e-8, 2e9, 4e9, 1e-6, 1e-11)
    assert cheapest(bucket_of(1 << 20, Signum(512)), 1, topology, local).name == "sra"


# --- large worlds -------------------------------------------------------------------------------------------

LARGE = [LayerSpec("w", (1 << 16,)), LayerSpec("b", (33,))]


class Nothing:
    """Stands for the memory of a step in which no rank has a gradient or waits for a mean."""

    def sources(self, *_) -> None:
        pass

    owned = outputs = sources

    def span(self, name: str):
        return nullcontext()


def sent(operation, rank: int) -> list[int]:
    """Returns the bytes of each message that an operation sends to another rank."""
    if isinstance(operation, Exchange):
        return [len(message) for _, message in operation.sends]
    if isinstance(operation, AllGather):
        return [operation.counts[rank]] * (len(operation.counts) - 1)
    assert isinstance(operation, AllToAll)
    return [count for r, count in enumerate(operation.send_counts) if r != rank and count]


def messages_of(reduction: str, world: int, hosts: int) -> list[int]:
    """Returns the number of messages that every rank sends."""
    name, servers = reduction.partition(":")[0], servers_of(reduction)
    if name in ("sra", "ring"):
        return [2 * (world - 1)] * world
    if name == "all_to_all":
        return [world - 1] * world
    if name == "gather":
        return [world - 1] + [1] * (world - 1)
    if name == "tree":
        return [sum(q & (q - 1) == r for q in range(1, world)) + (r > 0) for r in range(world)]
    if name == "parameter_server":
        return [servers - 1 + world - 1 if r < servers else servers for r in range(world)]
    of_each = world // hosts
    return [2 * (hosts - 1) + of_each - 1 if r % of_each == 0 else 1 for r in range(world)]


@every_reduction
def test_some_of_1024_ranks_send_what_the_formula_says(reduction: str, monkeypatch):
    """Each of them runs alone, on messages that no rank sent, so headers are not checked."""
    world = 1024
    topology = Topology(tuple(r // 64 for r in range(world)))
    monkeypatch.setattr(Headers, "read", lambda self, *_: [APPLIED | WAITING] * len(self.senders))
    parts = one_bucket(LARGE, plan_for(LARGE, Quantize(2, 32)))
    formula = cost(parse(reduction), load_of(parse(reduction), parts, len(LARGE)), topology)
    want = bytes_by_rank(formula, world)
    for rank in (0, 1, 64, 512, 1023):
        tracemalloc.start()
        built = make(reduction, parts, len(LARGE), rank, topology)
        kept = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        if reduction in ("sra", "ring", "all_to_all"):
            room = world * len(built._own.buffer) if reduction == "all_to_all" else 0
            assert kept - room < 2 << 20
        assert (built.rounds, built.bytes_sent) == (formula.rounds, want[rank])
        flags = BucketFlags(np.array([PRESENT] * len(LARGE) + [APPLIED | WAITING], np.uint8), rank)
        context, binding = StepContext(Draw(0, 0, rank), world), Nothing()
        program = framed(built.run(context, binding, flags), HeaderId(1, 2, 0), flags)
        found = [sent(operation, rank) for (operation,) in program]
        assert (len(found), sum(map(sum, found))) == (built.rounds, want[rank])
        assert sum(map(len, found)) == messages_of(reduction, world, 16)[rank]
