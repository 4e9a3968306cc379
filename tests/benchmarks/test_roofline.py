"""The roofline: its definition by hand, and the bytes that it is made of against the transport's counter."""

from __future__ import annotations

import pytest
from roofline import WireRecord, busiest_bytes, roofline

from gradcomp import LayerSpec, Quantize, TopK
from gradcomp.testing.simulation import Simulation, random_gradients

LAYERS = [LayerSpec("a", (40, 50)), LayerSpec("b", (300,)), LayerSpec("c", (70, 9))]


@pytest.mark.parametrize(
    ("buckets", "ready", "rate", "seconds"),
    [
        # Ready at 1 and 2 s, 3 s and 1 s of wire: 1 + 3 + 1, then 0.5 s after backward.
        pytest.param(
            [(300, "a"), (100, "b")], {"a": 1.0, "b": 2.0}, 100.0, 5.5, id="starts late, never waits"
        ),
        pytest.param(
            [(100, "a"), (100, "bc")], {"a": 1.0, "b": 2.0, "c": 9.0}, 100.0, 10.5, id="last bucket late"
        ),
        pytest.param([(1, "a")], {"a": 1.0, "b": 7.0}, 1e9, 7.5, id="never below the step without exchange"),
    ],
)
def test_the_roofline_is_the_time_of_a_wire_that_never_waits(buckets, ready, rate, seconds):
    found = roofline([(nbytes, list(layers)) for nbytes, layers in buckets], ready, 0.5, rate)
    assert found == pytest.approx(seconds)


def test_a_round_takes_as_long_as_the_rank_that_sends_most():
    # Two steps; rank 0 broadcasts 80 bytes in the first and rank 1 in the second, then both add 10.
    ranks = [[[[80, 10], [5]], [[0, 10], [5]]], [[[0, 10], [5]], [[80, 10], [7]]]]
    assert busiest_bytes(ranks) == [90.0, 6.0]


@pytest.mark.parametrize(
    ("compressor", "rounds"),
    [(Quantize(4, 64), {2}), (TopK(0.1, zeros=True), {1}), (TopK(0.1, indices="deflate"), {1, 2})],
    ids=["reduced", "gathered", "of varying size"],
)
@pytest.mark.parametrize("world", [2, 3])
def test_every_byte_of_a_step_is_counted_in_its_round(compressor, rounds, world):
    simulation = Simulation(LAYERS, compressor, world=world, slice_elements=500, statistics_every_steps=0)
    records = [WireRecord(rank.pipeline, 2) for rank in simulation.ranks]
    counted = []
    for step in range(3):
        counted.append([rank.transport.bytes_sent for rank in simulation.ranks])
        simulation.step(random_gradients(LAYERS, world, seed=step))
    for rank, (record, before) in enumerate(zip(records, counted[1], strict=True)):
        kept = record.rounds()
        assert len(kept) == 2
        assert {len(bucket) for step in kept for bucket in step} == rounds
        sent = simulation.ranks[rank].transport.bytes_sent - before
        assert sum(n for step in kept for bucket in step for n in bucket) == sent
