"""Predicted step times: cases by hand, the pipeline's own order of collectives, and what follows from them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest

from gradcomp import Config, LayerSpec, PowerSGD, Quantize, TopK
from gradcomp.compress import Cast, Identity, from_string
from gradcomp.compress.groups import Piece
from gradcomp.compress.policy import assign
from gradcomp.control import Environment
from gradcomp.control.forecast import (
    Forecast,
    Job,
    Observed,
    Rates,
    assignment,
    choose,
    decide,
    fit_link,
    forecast,
    layer_readiness,
    observed_job,
    order_of,
    plan_trips,
)
from gradcomp.control.step_time import POLLING, Round, Timeline, Trip, simulate
from gradcomp.core.plan import Plan
from gradcomp.core.scheme import Scheme
from gradcomp.core.topology import Topology
from gradcomp.exchange.arrivals import Submission
from gradcomp.exchange.pipeline import Pipeline
from gradcomp.reduce.costs import predict
from gradcomp.reduce.header import ByteHeader
from gradcomp.reduce.model import Load, Network
from gradcomp.transport.inprocess import InProcessTransport, World

ENDLESS = Rates(math.inf, math.inf)
CHOICES = [from_string(text) for text in ("none", "bf16", "quantize:bits=8", "quantize:bits=4")]
EXACT = Cast("float32")


def apart(world: int) -> Topology:
    return Topology(tuple(range(world)))


def link(beta: float, alpha: float = 0.0) -> Network:
    return Network(alpha, beta, 1.0, 1.0)  # forecasts have rates of their own


def job_of(layers, ready, *, world=2, slice_elements=1 << 20, controlled=None, scheme="sra") -> Job:
    setting = setting_of(layers, world, controlled, scheme, slice_elements)
    return Job(setting, list(reversed(range(len(layers)))), np.array(ready, dtype=float))


def setting_of(layers, world=2, controlled=None, scheme="sra", slice_elements=1 << 20) -> Environment:
    compressors = [Quantize(4) if controlled is None or i in controlled else None for i in range(len(layers))]
    return Environment(layers, compressors, 0, apart(world), Scheme(scheme), slice_elements=slice_elements)


def last_end(complete, rounds) -> float:
    """When the last collective ends, if coding costs nothing."""
    return simulate(complete, [Trip((), tuple(some), 0.0) for some in rounds], shared=False).end


# --- by hand ------------------------------------------------------------------------------------------------


def test_one_bucket_without_compression():
    """A ring over 4 ranks: 6 rounds of 1/4 of 4000 bytes after the last gradient, encoding and decoding on top."""
    job = job_of([LayerSpec("w", (1000,))], [0.5], world=4)
    found = forecast(job, Identity(), Rates(8e3, 16e3), link(1e-3, 0.01))
    wire = 6 * (0.01 + 1e-3 * 1000)
    assert found.exposed == pytest.approx(wire)
    assert found.step == pytest.approx(0.5 + wire + 4000 * (1 / 8e3 + 1.75 / 16e3))


def test_one_coded_bucket_takes_what_the_reduction_costs():
    layer = LayerSpec("w", (4096,))
    job = job_of([layer], [0.5], world=4)
    payload = 4096 / 2 + 8 * 4096 / 512
    expected = predict(
        Scheme("sra"), Load(payload, 4 * 4096, ByteHeader.size(1)), apart(4), Network(0.01, 1e-6, 1e6, 2e6)
    )
    assert forecast(job, Quantize(4), Rates(1e6, 2e6), link(1e-6, 0.01)).step == pytest.approx(0.5 + expected)


@pytest.mark.parametrize(
    ("scheme", "cheapest"), [("hierarchical", "hierarchical"), ("tree", "tree"), ("auto", "hierarchical")]
)
def test_any_reduction_among_any_hosts(scheme, cheapest):
    topology, network = Topology((0, 0, 1, 1)), Network(1e-4, 1e-6, math.inf, math.inf, 1e-6, 1e-11)
    job = job_of([LayerSpec("w", (1 << 16,))], [0.0], scheme=scheme)
    job = replace(job, environment=replace(job.environment, topology=topology))
    (trip,) = plan_trips(job, Quantize(4), ENDLESS, network)
    load = Load((1 << 15) + 8 * (1 << 7), 4 << 16, ByteHeader.size(1))
    expected = predict(Scheme(cheapest), load, topology, network)
    assert sum(one.busy + one.latency for one in trip.rounds) == pytest.approx(expected)


def test_gathered_payloads_go_to_everyone():
    layer = LayerSpec("w", (64, 64))
    job = job_of([layer], [0.0], world=5)
    (trip,) = plan_trips(job, TopK(0.125, indices="raw"), ENDLESS, link(1e-6))
    # 512 values and indices of 4 bytes to four ranks.
    assert sum(one.busy for one in trip.rounds) == pytest.approx(1e-6 * 4 * 512 * 8, rel=0.01)


def test_low_rank_travels_in_sums():
    job = job_of([LayerSpec("w", (64, 64))], [0.0])
    (trip,) = plan_trips(job, PowerSGD(2), ENDLESS, link(1e-6))
    assert [one.busy for one in trip.rounds] == [pytest.approx(1e-6 * 4 * 2 * 128)]


def test_backward_hides_what_is_early():
    """Three buckets of 1 s each: complete at 0, 1 and 5, the last one alone is exposed."""
    rounds = [[Round(1.0, 0.0)]] * 3
    assert last_end([0.0, 1.0, 5.0], rounds) == 6.0
    assert last_end([0.0, 0.0, 0.0], rounds) == 3.0


def test_the_last_round_of_a_bucket_waits_for_the_next_bucket():
    """Tick 1 begins when bucket 1 is complete: only then does round 1 of bucket 0 travel, beside its round 0."""
    two = [Round(1.0, 0.0)] * 2
    assert last_end([0.0, 100.0], [two, two]) == 103.0


def test_latencies_overlap_with_bytes_and_bytes_queue():
    """Bucket 0: 0-1 (+0.5). Bucket 1: 1-2 (+0.5); its tick waits for 1.5. Second rounds: 2-3, then 3-4, +0.5."""
    two = [Round(1.0, 0.5)] * 2
    assert last_end([0.0, 0.0], [two, two]) == pytest.approx(4.5)


def test_coding_waits_for_gradients_and_collectives_for_coding():
    """Bucket 0: encoded 0-1, sent 1-3. Bucket 1: encoded 1-2, sent 3-5. Bucket 0 is decoded 3-4, bucket 1 5-6."""
    trip = Trip((), (Round(2.0, 0.0, coding=1.0),), 1.0)
    assert simulate([0.0, 0.0], [trip, trip], shared=False) == Timeline(6.0, (0.0, 0.0, 0.0))


def test_on_a_shared_core_the_exchange_delays_the_gradients_that_follow():
    """Bucket 0 takes 1 s to encode, 0.5 s of its transport's work and a tenth of 2 s of waiting: bucket 1 is late."""
    first, second = Trip((), (Round(2.0, 0.0, 1.0, 0.5),), 0.25), Trip((), (Round(1.0, 0.0),), 0.0)
    made = simulate([1.0, 10.0], [first, second], shared=True)
    late = 1.0 + 0.5 + POLLING * 2.0
    assert made.taken[:2] == (0.0, late)
    assert made.taken[2] == pytest.approx(late + 0.25 + POLLING)
    # Bucket 1 is sent at once, and bucket 0 decoded meanwhile.
    assert made.end == pytest.approx(10.0 + late + 1.0)
    free = simulate([1.0, 10.0], [first, second], shared=False)
    assert free == Timeline(11.0, (0.0, 0.0, 0.0))


def test_a_link_that_is_faster_than_the_processor_waits_for_it():
    assert simulate([0.0], [Trip((), (Round(1.0, 0.25, 0.0, 3.0),), 0.0)], shared=True).end == 3.25


def test_what_was_observed_is_freed_of_what_the_exchange_took():
    """Times that were observed beside an uncompressed exchange on one core give the times of the computing alone."""
    setting = replace(setting_of(MODEL), shared_core=True, byte_seconds=1e-9)
    network = Network(1e-5, 8e-9, 1.0, 1.0, overhead=2e-4)
    order = [5, 4, 3, 2, 1, 0]
    true = Job(setting, order, np.array([0.05, 0.045, 0.04, 0.03, 0.02, 0.01]))
    trips = plan_trips(true, CHOICES[0], SPEEDS[0], network)
    complete = [max(true.ready[i] for i in trip.layers) for trip in trips]
    taken = simulate(complete, trips, shared=True).taken
    position = {i: k for k, trip in enumerate(trips) for i in trip.layers}
    seen = [0.005, *(a + b for a, b in zip(complete, taken, strict=False))]
    observed = Observed([position[i] for i in range(len(MODEL))], seen, SPEEDS, network, 0.0)
    found = observed_job(setting, CHOICES[0], SPEEDS[0], observed)
    assert taken[1] > 0.01
    assert found.compute == pytest.approx(true.compute)


def test_one_round_a_bucket_is_the_roofline():
    random = np.random.default_rng(3)
    for _ in range(50):
        count = int(random.integers(1, 9))
        complete = np.sort(random.random(count)).tolist()
        seconds = (random.random(count) * 0.4).tolist()
        roofline = max(complete[k] + sum(seconds[k:]) for k in range(count))
        assert last_end(complete, [[Round(s, 0.0)] for s in seconds]) == pytest.approx(roofline)


def test_nothing_to_send_is_the_time_that_computes():
    job = job_of([LayerSpec("w", (100,)), LayerSpec("v", (100,))], [0.7, 0.2], world=1)
    assert forecast(job, Quantize(4), ENDLESS, link(1.0)) == Forecast(pytest.approx(0.7), 0.0)


def test_free_communication_leaves_the_coding():
    layers = [LayerSpec("w", (5000,)), LayerSpec("v", (5000,))]
    found = forecast(job_of(layers, [0.7, 0.2]), Quantize(4), Rates(4e6, 4e6), link(0.0))
    assert found.exposed == 0.0
    assert found.step == pytest.approx(0.7 + 4e4 * (1.5 + 2) / 4e6)


def test_excluded_layers_ride_along_exactly():
    layers = [LayerSpec("w", (4096,)), LayerSpec("b", (16,)), LayerSpec("d", (8,), "float64")]
    setting = setting_of(layers, controlled=[0])
    assert assignment(setting, Quantize(4)) == [Quantize(4), EXACT, Identity()]
    assert assignment(setting, Identity()) == [Identity()] * 3
    assert assignment(setting, TopK(0.01)) == [TopK(0.01), Identity(), Identity()]


# --- against the pipeline ---------------------------------------------------------------------------------------


@dataclass
class Clock:
    now: float = 0.0


class Timed:
    """A collective that takes its time."""

    def __init__(self, inner, clock: Clock, end: float) -> None:
        self.inner, self.clock, self.end = inner, clock, end

    def poll(self) -> bool:
        return self.clock.now >= self.end and self.inner.poll()


class Slow(InProcessTransport):
    """Collectives queue for a link of alpha and beta; an allreduce is a ring."""

    def __init__(self, world: World, rank: int, clock: Clock, alpha: float, beta: float) -> None:
        super().__init__(world, rank)
        self.clock, self.alpha, self.beta = clock, alpha, beta
        self.free = 0.0
        self.ends: list[float] = []
        self.sizes: list[int] = []

    def _join(self, kind, *arguments):
        inner = super()._join(kind, *arguments)
        nbytes = self.bytes_sent - sum(self.sizes)
        self.sizes.append(nbytes)
        rounds = 2 * (self.size - 1) if kind == "allreduce" else 1
        self.free = max(self.free, self.clock.now) + self.beta * nbytes
        self.ends.append(self.free + rounds * self.alpha)
        return Timed(inner, self.clock, self.ends[-1])


def run(layers, compressors, order, ready, world, alpha, beta, slice_elements, scheme) -> float:
    """When the exchange of the real pipeline ends, on a clock that jumps from event to event."""
    clock, meeting = Clock(), World(world)
    plan = Plan(0, tuple(assign(layer.name, c) for layer, c in zip(layers, compressors, strict=True)))
    config = Config(slice_elements=slice_elements, reorder=False, statistics_every_steps=0, reduction=scheme)
    pipelines = [
        Pipeline(layers, plan, Slow(meeting, r, clock, alpha, beta), config, lambda layer: 0)
        for r in range(world)
    ]
    gradients = [[np.ones(layer.size, np.float32) for layer in layers] for _ in pipelines]
    left = sorted(range(len(layers)), key=lambda i: ready[i])
    for pipeline in pipelines:
        pipeline.ordering.order = list(order)
        pipeline.layout = pipeline._relayout()
        pipeline.open()
    while any(p.is_open for p in pipelines):
        while left and ready[left[0]] <= clock.now:
            layer = left.pop(0)
            for pipeline, arrays in zip(pipelines, gradients, strict=True):
                address = arrays[layer].ctypes.data
                pipeline.arrivals.submit(Submission(layer, address, address))
            if not left:
                for pipeline in pipelines:
                    pipeline.arrivals.flush()
        observed = None
        while observed != (
            observed := [(p.position, p.advances, p.is_open, p.transport._number) for p in pipelines]
        ):
            for pipeline in pipelines * 2:
                pipeline.poll()
        events = [end for p in pipelines for end in p.transport.ends if end > clock.now]
        events += [ready[layer] for layer in left]
        if any(p.is_open for p in pipelines):
            clock.now = min(events)
    return clock.now


LSTM = [LayerSpec("embedding", (6144,)), LayerSpec("hidden", (10, 1024)), LayerSpec("bias", (512,)),
        LayerSpec("head", (8192,)), LayerSpec("small", (64,))]  # fmt: skip


@pytest.mark.parametrize("choice", ["none", "quantize:bits=4,bucket_size=16"])
@pytest.mark.parametrize(("world", "scheme"), [(2, "sra"), (3, "sra"), (4, "ring"), (3, "all_to_all")])
@pytest.mark.parametrize("slice_elements", [2048, 1 << 20])
def test_it_is_when_the_pipelines_last_collective_ends(choice, world, scheme, slice_elements):
    random = np.random.default_rng(world)
    for beta, alpha in ((1e-6, 0.0), (1e-5, 0.0), (1e-6, 0.01), (1e-7, 1e-3)):
        order = [4, 3, 2, 1, 0]
        ready = np.zeros(5)
        ready[order] = np.sort(random.random(5)) * 0.2
        setting = setting_of(LSTM, world, {0, 1, 3}, scheme, slice_elements)
        job = Job(setting, order, ready)
        chosen = from_string(choice)
        trips = plan_trips(job, chosen, ENDLESS, link(beta, alpha))
        complete = [max(ready[i] for i in trip.layers) for trip in trips]
        expected = last_end(complete, [trip.rounds for trip in trips])
        found = run(
            LSTM, assignment(setting, chosen), order, ready, world, alpha, beta, slice_elements, scheme
        )
        # Chunks are cut at quantisation buckets here, and evenly there; sums carry votes.
        assert expected == pytest.approx(found, rel=0.03, abs=1e-4)


# --- readiness ----------------------------------------------------------------------------------------------


def test_layers_of_a_bucket_become_ready_one_after_the_other():
    buckets = [[Piece(3, 0, 30), Piece(2, 0, 10)], [Piece(2, 10, 50), Piece(0, 0, 100)]]
    ready = layer_readiness(buckets, 4, 1.0, [5.0, 8.0])
    # Layer 2 goes on in the second bucket, so it was there when the first was complete; layer 1 does not travel.
    np.testing.assert_allclose(ready, [8.0, 0.0, 5.0, 4.0])


def test_buckets_that_were_not_foreseen_are_as_late_as_the_last():
    ready = layer_readiness([[Piece(0, 0, 1)], [Piece(1, 0, 1)]], 2, 0.0, [2.0])
    np.testing.assert_allclose(ready, [2.0, 2.0])
    np.testing.assert_allclose(layer_readiness([[Piece(0, 0, 0)]], 1, 0.0, [2.0]), [2.0])


def test_the_order_is_that_of_buckets_and_of_backward():
    assert order_of([1, 0, 0, -1, 1]) == [2, 1, 4, 0]


# --- the choice ---------------------------------------------------------------------------------------------


def steps(*pairs) -> list[Forecast]:
    return [Forecast(step, exposed) for step, exposed in pairs]


@pytest.mark.parametrize(
    ("forecasts", "current", "chosen"),
    [
        (steps((1.02, 0.02), (1.0, 0.0)), 0, 0),  # the first hides it
        (steps((2.0, 1.0), (1.2, 0.04), (1.1, 0.0)), 0, 1),  # the second does, a faster one is not looked at
        (steps((2.0, 1.0), (1.6, 0.5), (1.5, 0.4)), 0, 2),  # none does: the fastest
        (steps((1.07, 0.07), (1.3, 0.01)), 0, 0),  # what hides it costs more than it hides
        (steps((1.5, 0.5), (1.5, 0.5), (1.49, 0.4)), 0, 0),  # gains less than 2%
        (steps((1.5, 0.5), (1.4, 0.4), (1.4, 0.4)), 0, 1),  # among equals, less compression
        (steps((1.04, 0.04), (1.0, 0.0)), 1, 0),  # back, although slower: it hides
        (steps((1.5, 0.5), (1.495, 0.4)), 1, 1),
        (steps((1.49, 0.5), (1.5, 0.4)), 1, 1),  # not back: no gain, nothing hidden
        (steps((1.4, 0.4), (1.5, 0.4)), 1, 0),
    ],
)  # fmt: skip
def test_the_least_that_hides_it(forecasts, current, chosen):
    assert choose(forecasts, 1.0, current, 0.05) == chosen


MODEL = [
    LayerSpec(f"layer{i}", (n,))
    for i, n in enumerate((60_000, 300_000, 1_500_000, 1_500_000, 2_000_000, 9000))
]
#: What the codecs reach on one core.
SPEEDS = [Rates(8e9, 8e9), Rates(8e9, 10e9), Rates(5e9, 9e9), Rates(5e9, 9e9)]


def observation(beta: float, alpha: float = 1e-5, world: int = 2, current: int = 0) -> Observed:
    """Without compression the model has two buckets, complete after 30 and 50 ms; a step takes what is predicted."""
    observed = Observed([1, 1, 1, 0, 0, 0], [0.01, 0.03, 0.05], SPEEDS, link(beta, alpha), 0.0)
    job = observed_job(setting_of(MODEL, world), CHOICES[current], SPEEDS[current], observed)
    return replace(observed, step=forecast(job, CHOICES[current], SPEEDS[current], observed.network).step)


def decision(beta: float, alpha: float = 1e-5, world: int = 2, current: int = 0, controlled=None) -> int:
    observed = observation(beta, alpha, world, current)
    return int(decide(setting_of(MODEL, world, controlled), CHOICES, current, observed, 0.05)[0])


def test_what_lies_between_is_chosen_between():
    found = {decision(beta) for beta in np.geomspace(1e-10, 1e-7, 40).tolist()}
    assert found == {0, 1, 2, 3}


@pytest.mark.parametrize(("world", "alpha"), [(2, 1e-6), (8, 2e-4)])
def test_a_slower_link_never_gets_less_compression(world, alpha):
    chosen = [decision(beta, alpha, world) for beta in np.geomspace(1e-11, 1e-6, 60).tolist()]
    assert chosen == sorted(chosen)
    assert chosen[-1] == 3


def test_from_any_choice_a_fast_network_leads_back_to_none():
    assert {decision(1e-13, current=k) for k in range(4)} == {0}


def test_a_decision_says_what_it_predicts():
    job = replace(job_of([LayerSpec("w", (1 << 20,))], [0.02]))
    expected = [forecast(job, c, r, link(1e-9, 1e-5)) for c, r in zip(CHOICES, SPEEDS, strict=True)]
    observed = Observed([0], [0.01, 0.02], SPEEDS, link(1e-9, 1e-5), expected[0].step)
    chosen, compute, exposed, factor, *predicted = decide(
        setting_of([LayerSpec("w", (1 << 20,))]), CHOICES, 0, observed, 0.05
    )
    assert (compute, factor) == (0.02, 1.0)
    assert predicted == [one.step for one in expected]
    assert exposed == expected[int(chosen)].exposed


@pytest.mark.parametrize("current", [0, 3])
@pytest.mark.parametrize(
    ("factor", "fitted"), [(0.7, 0.7), (3.3, 3.3), (0.1, 0.25), (40.0, 4.0), (1.005, 1.0)]
)
def test_a_link_whose_rate_the_probe_misses_is_fitted(factor, fitted, current):
    """Steps are those of a link that takes ``factor`` times what the probe says; all predictions become right."""
    true = observation(8e-8 * factor, current=current)
    wrong = replace(true, network=link(8e-8, 1e-5))
    found = decide(setting_of(MODEL), CHOICES, current, wrong, 0.05)
    expected = decide(setting_of(MODEL), CHOICES, current, observation(8e-8 * fitted, current=current), 0.05)
    assert found[0] == expected[0]
    assert found[3:] == pytest.approx([fitted, *expected[4:]], rel=1e-3)


def test_a_link_that_hides_everything_is_left_as_measured():
    observed = observation(1e-13)
    job = observed_job(setting_of(MODEL), CHOICES[0], SPEEDS[0], observed)
    assert fit_link(job, CHOICES[0], SPEEDS[0], observed.network, observed.step * 1.01) == 1.0
