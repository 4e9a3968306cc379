"""The model of many ranks: bytes by formula, terms, limits, and counts of calls at the store."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import scaling
import scaling_model as model
import scaling_simulation as simulation
import scaling_start as start_up

from gradcomp.core.scheme import parse
from gradcomp.reduce.costs import predict
from gradcomp.reduce.model import Load, Network

ROOT = Path(__file__).resolve().parents[2]
RATES = {name: (1e9, 2e9) for name, family in model.FAMILIES.items() if family.travels == model.REDUCED}
GIVEN = model.Constants(
    50e-6, 5e-6, 5e9, 20e-6, 200e-6, 1e-3, RATES,
    {"TopK 1%": (5e-3, 1e-4), "CLT-k 1%": (5e-3, 0.0), "PowerSGD 4": (5e-3, 0.0)},
)  # fmt: skip


def test_ranks_send_what_the_formulas_say_for_every_family_and_reduction():
    families = [family for family in model.FAMILIES.values() if family.travels == model.REDUCED]
    reductions = 7 * len(families) - 3  # votes have no partial sums
    others = len(model.FAMILIES) - len(families)
    assert simulation.verify(worlds=(2, 5)) == (reductions + others) * (2 + 5)


@pytest.mark.parametrize("reduction", model.REDUCTIONS)
@pytest.mark.parametrize(("world", "of_each"), [(2, 1), (5, 1), (8, 1), (16, 8), (16, 4)])
def test_the_busiest_rank_has_the_messages_of_the_formula(reduction: str, world: int, of_each: int):
    topology = model.hosts_of(world, of_each)
    ranks = simulation.Ranks(simulation.SMALL, "quantize:bits=4", reduction, topology)
    counted = [0] * world
    for pipeline in ranks.pipelines:
        transport = pipeline.transport
        exchange = transport.exchange

        def counting(sends, recvs, rank=transport.rank, exchange=exchange):
            counted[rank] += len(sends) + len(recvs)
            return exchange(sends, recvs)

        def all_to_all(send, send_counts, recv, recv_counts, each=transport, call=transport.alltoallv):
            for rank in range(each.size):
                if rank != each.rank:
                    counted[each.rank] += (send_counts[rank] > 0) + (recv_counts[rank] > 0)
            return call(send, send_counts, recv, recv_counts)

        def gather(buffer, counts, each=transport, call=transport.allgatherv):
            others = [count for rank, count in enumerate(counts) if rank != each.rank]
            counted[each.rank] += sum(n > 0 for n in others) + (counts[each.rank] > 0) * (each.size - 1)
            return call(buffer, counts)

        transport.exchange, transport.alltoallv, transport.allgatherv = counting, all_to_all, gather
    ranks.step()
    # The first step ends with the order of rank 0, one message more to every other rank, and none without reordering.
    assert max(counted) == model.messages(reduction, topology)


def test_the_figure_in_the_documentation_is_of_the_stored_constants():
    given = scaling.read(ROOT / "benchmarks" / "scaling_constants.json")
    times = scaling.predict("25 M", given, worlds=model.RANKS[:2])
    assert scaling.digest(times).encode() in (ROOT / "docs" / "scaling.png").read_bytes()
    assert "scaling.png" in (ROOT / "docs" / "benchmarks" / "scaling.md").read_text(encoding="utf-8")


def test_buckets_in_flight_share_the_latency_and_nothing_else():
    sizes = model.Sizes(1000.0, 8000.0, 48)
    topology = model.hosts_of(64, 1)
    one, many = (model.exchange("4 bits", "ring", sizes, b, topology, 10, GIVEN) for b in (1, 24))
    assert one.latency == pytest.approx(126 * 50e-6)
    assert many.latency == pytest.approx((126 + 23) * 50e-6)
    assert many.bytes == pytest.approx(24 * one.bytes)
    assert many.coding == pytest.approx(24 * one.coding)
    assert one.handling == pytest.approx(1e-3 + 20e-6 * 4 * 63 + 200e-6 * 126)


def test_gathered_payloads_grow_with_the_ranks_and_reduced_ones_do_not():
    sizes = model.Sizes(10_000.0, 4_000_000.0, 48)
    few, many = (
        {n: model.exchange(name, "sra", sizes, 1, model.hosts_of(n, 1), 10, GIVEN).bytes for n in (8, 512)}
        for name in ("4 bits", "TopK 1%")
    )
    assert many[512] / many[8] == pytest.approx(511 / 7)
    assert few[512] == pytest.approx(
        2 * 8e-9 / 10 * (511 / 512 * 10_000 + 511 * 60), rel=0.05
    )  # and the headers, with padding
    assert few[8] < few[512] < 6 * few[8]


def test_a_limit_is_where_a_time_stays_above_the_baseline_and_names_what_grew_most():
    def time(latency: float, handling: float) -> model.Time:
        return model.Time(latency, 0.0, 0.0, handling)

    baseline = {n: time(1.0, 1.0) for n in (8, 16, 32, 64)}
    rises = {8: time(3.0, 0.0), 16: time(0.5, 0.5), 32: time(1.0, 1.5), 64: time(1.5, 9.0)}
    assert model.limit(rises, baseline) == (32, "handling")
    assert model.limit(baseline, baseline) is None
    assert model.limit({n: time(2.0, 0.0) for n in baseline} | {64: time(3.0, 1.0)}, baseline) == (
        64,
        "latency",
    )


def test_every_family_is_listed_with_the_reductions_that_it_can_use():
    rows = {name for name, _ in scaling.combinations(model.OF_EACH)}
    assert rows == set(model.FAMILIES)
    assert ("votes", "ring") not in scaling.combinations(1)
    assert ("4 bits", "hierarchical") not in scaling.combinations(1)


def test_a_start_makes_a_few_calls_for_each_rank_at_the_store(monkeypatch):
    monkeypatch.setattr(start_up, "WATCHED_SECONDS", 0.1)
    for size in (4, 16):
        phases, keys = start_up.start(size)
        introduced, compared, _ = phases
        assert introduced.total == 0
        # The first rank writes its arrival, reads all others, and writes that all are there; the others read that.
        assert (compared.first, compared.others) == (2 * (size - 1) + 2, 3.0)
        assert keys == {"meeting/all-N/N": size, "meeting/all-N/all": 1}


@pytest.mark.parametrize("reduction", model.REDUCTIONS)
def test_the_times_on_the_wire_are_those_of_the_package(reduction: str):
    load = Load(540_672.0, 4_194_304.0, 48)
    topology = model.hosts_of(64, 1)
    rounds = model.rounds_of(reduction, load, topology)
    network = Network(GIVEN.alpha, 8e-10, math.inf, math.inf, GIVEN.local_alpha, 1 / GIVEN.local_rate)
    expected = predict(parse(reduction), load, topology, network)
    assert rounds.latency(GIVEN) + rounds.seconds(GIVEN, 10) == pytest.approx(expected)
