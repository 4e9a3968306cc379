"""Predicts the time of a step under a choice, from alpha and beta of the link and the order of collectives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

import numpy as np

from gradcomp.compress import Compressor, Identity
from gradcomp.compress.groups import Piece, by_family, group_of, pack
from gradcomp.compress.messages import Broadcast, Gather, Reduce
from gradcomp.compress.policy import EXACT
from gradcomp.control.base import Doubles, Environment
from gradcomp.control.distortion.round_trip import Rates
from gradcomp.control.step_time import Round, Trip, simulate
from gradcomp.core.scheme import AUTO, Scheme
from gradcomp.kernels.codec import Draw
from gradcomp.kernels.step import StepContext
from gradcomp.reduce import Part
from gradcomp.reduce.costs import cheapest, cost, load_of
from gradcomp.reduce.header import ByteHeader
from gradcomp.reduce.model import Load, Network

#: A change must shorten the predicted step by more than this fraction of it.
MARGIN = 0.02
_MOST_FACTOR, _HALVINGS = 4.0, 12  # 12 halvings determine the factor to 0.1%


@dataclass(frozen=True)
class Job:
    """The exchange of a step. The layers that ``environment`` controls take the choice; the others are exact.

    ``order``: the exchanged layers, in the order in which exchange buckets are filled. ``ready``: by layer, seconds
    from the end of the last exchange until every rank has its gradient, as if nothing were exchanged.
    """

    environment: Environment
    order: Sequence[int]
    ready: Doubles

    @property
    def compute(self) -> float:
        """Returns the seconds of a step that exchanges nothing."""
        return max((float(self.ready[i]) for i in self.order), default=0.0)

    def buckets(self, choice: Compressor) -> list[list[Piece]]:
        """Returns the pieces of layers in each exchange bucket that the choice makes."""
        compressors = assignment(self.environment, choice)
        layers, most = self.environment.layers, self.environment.slice_elements
        return pack(layers, compressors, self.order, frozenset(), most)


@dataclass(frozen=True)
class Forecast:
    """Predicted seconds of a step; ``exposed`` seconds would be saved if communication took no time."""

    step: float
    exposed: float


def forecast(job: Job, choice: Compressor, rates: Rates, network: Network) -> Forecast:
    """Predicts the step under a choice.

    step = max(E, C + taken); exposed = the same with coding and the processor's work for free, less C. E: when the
    last bucket is decoded; taken: what the exchange takes from the computing, 0 unless they share a core; both are
    those of :func:`simulate`. C: seconds of a step that exchanges nothing.

    The prediction leaves out rounds after a compressor's first, whose bytes count in the first. A payload whose size
    depends on the data counts as its upper bound.
    """
    trips = plan_trips(job, choice, rates, network)
    complete = completion(job.ready, trips)
    made = simulate(complete, trips, job.environment.shared_core)
    step = max(made.end, job.compute + made.taken[-1])
    wire = simulate(complete, list(map(_without_work, trips)), job.environment.shared_core)
    return Forecast(step, max(wire.end - job.compute, 0.0))


def _without_work(trip: Trip) -> Trip:
    return Trip(trip.layers, tuple(Round(one.busy, one.latency) for one in trip.rounds), 0.0)


def completion(ready: Doubles, trips: Sequence[Trip]) -> list[float]:
    """Returns when each exchange bucket is complete."""
    return [max((float(ready[i]) for i in trip.layers), default=0.0) for trip in trips]


@dataclass(frozen=True)
class Observed:
    """The measurements that a decision is made from.

    ``position`` has the last exchange bucket of each layer, or -1 if the layer is in none. ``seconds`` has the time
    from the end of the last exchange to the opening of this one, and to the moment when each exchange bucket was
    complete on the slowest rank. ``rates`` has the slowest rank's rates, by choice. ``network`` is the result of the
    probe. ``step`` is the time of a step under the current choice, in seconds.
    """

    position: Sequence[int]
    seconds: Sequence[float]
    rates: Sequence[Rates]
    network: Network
    step: float


def decide(
    environment: Environment, choices: Sequence[Compressor], current: int, observed: Observed, hidden: float
) -> list[float]:
    """Returns the chosen index, seconds computed and exposed, the link's factor, and the step time of each choice.

    The factor is that of :func:`fit_link`.
    """
    job = observed_job(environment, choices[current], observed.rates[current], observed)
    factor = fit_link(job, choices[current], observed.rates[current], observed.network, observed.step)
    network = slower(observed.network, factor)
    found = [forecast(job, c, r, network) for c, r in zip(choices, observed.rates, strict=True)]
    chosen = choose(found, job.compute, current, hidden)
    return [float(chosen), job.compute, found[chosen].exposed, factor, *(one.step for one in found)]


def observed_job(environment: Environment, current: Compressor, rates: Rates, observed: Observed) -> Job:
    """Returns the job that was observed under the current choice, with the times at which its gradients were ready."""
    layers = len(environment.layers)
    job = Job(environment, order_of(observed.position), np.zeros(layers))
    opened, complete = observed.seconds[0], observed.seconds[1:]
    if environment.shared_core:
        # What the exchange took from the core while it was observed is no part of the computing.
        trips = plan_trips(job, current, rates, observed.network)[: len(complete)]
        taken = simulate(complete[: len(trips)], trips, shared=True, observed=True).taken
        complete = [max(seconds - taken[min(k, len(trips))], opened) for k, seconds in enumerate(complete)]
    return replace(job, ready=layer_readiness(job.buckets(current), layers, opened, complete))


def slower(network: Network, factor: float) -> Network:
    """Returns the network with the same latencies; every byte takes ``factor`` times as long."""
    return replace(network, beta=factor * network.beta, local_beta=factor * network.local_beta)


def fit_link(job: Job, choice: Compressor, rates: Rates, network: Network, step: float) -> float:
    """Returns the factor on seconds per byte at which the predicted step takes as long as the measured one.

    A short probe does not reach the rate of a shaped link, and ignores the cores that the bytes of a step need as well.
    The factor lies between 1/4 and 4. It is 1 if the prediction is right within 2%, since hidden communication tells
    nothing about the cost of its bytes.
    """

    def predicted(factor: float) -> float:
        return forecast(job, choice, rates, slower(network, factor)).step

    if abs(predicted(1.0) - step) <= MARGIN * step:
        return 1.0
    low, high = 1 / _MOST_FACTOR, _MOST_FACTOR
    for _ in range(_HALVINGS):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if predicted(middle) < step else (low, middle)
    return math.sqrt(low * high)


def choose(forecasts: Sequence[Forecast], compute: float, current: int, hidden: float) -> int:
    """Returns the index of the choice to use; choices are listed from least to most compression.

    Candidates are the choices up to the first whose exposed time is at most ``hidden`` of ``compute``, or all if there
    is none. The candidate with the shortest step is taken, of equal ones the one that compresses less. But ``current``
    stays unless the step becomes shorter by more than 2%, or less compression hides the communication too.
    """
    hides = [one.exposed <= hidden * compute for one in forecasts]
    last = hides.index(True) if any(hides) else len(hides) - 1
    steps = [one.step for one in forecasts]
    best = min(range(last + 1), key=steps.__getitem__)
    gains = steps[best] < (1 - MARGIN) * steps[current]
    return best if gains or (best < current and hides[best]) else current


# --- collectives of a step ------------------------------------------------------------------------------------


def assignment(environment: Environment, choice: Compressor) -> list[Compressor]:
    """Returns every layer's compressor; layers that are not controlled are exact, as a policy assigns them."""
    exact = EXACT if choice.traits.reduces else Identity()
    return [
        choice if own is not None else Identity() if layer.dtype == "float64" else exact
        for layer, own in zip(environment.layers, environment.compressors, strict=True)
    ]


def plan_trips(job: Job, choice: Compressor, rates: Rates, network: Network) -> list[Trip]:
    """Returns the exchange buckets that the choice makes, in order."""
    specs, topology = job.environment.layers, job.environment.topology
    compressors = assignment(job.environment, choice)
    context = StepContext(Draw(0, 0, 0), topology.world)
    network = replace(network, encode_rate=rates.encode, decode_rate=rates.decode)
    trips = []
    buckets = job.buckets(choice)
    for pieces in buckets:
        layers = tuple(dict.fromkeys(piece.layer for piece in pieces))
        parts: list[Part] = []
        ways: list[tuple[list[Round], float]] = []
        for members in by_family(pieces, specs, compressors):
            group = group_of(members, specs, compressors)
            first = next(group.compressor.exchange(group, context))
            if isinstance(first, Reduce):
                parts.append(Part(first.codec, group, np.zeros(len(group.table), dtype=np.int64)))
                continue
            load = Load(float(group.compressor.wire_bytes(group).sum()), 4.0 * group.elements)
            # An allreduce is predicted as a ring; gathered payloads go directly to every rank.
            scheme = Scheme("all_to_all" if isinstance(first, Gather | Broadcast) else "ring")
            ways.append(_fused(_way(scheme, load, job.environment, network)))
        if parts:
            scheme = job.environment.scheme
            if scheme.name == AUTO:
                scheme = cheapest(parts, len(layers), topology, network, len(buckets))
            exact = load_of(scheme, parts, len(layers))
            load = Load(exact.payload, exact.dense, ByteHeader.size(len(layers)))
            ways.append(_way(scheme, load, job.environment, network))
        # The rounds of a bucket's groups run in lock step: bytes and work add up, latencies overlap.
        together = [
            [r for r in rounds if r is not None] for rounds in zip_longest(*(rounds for rounds, _ in ways))
        ]
        trips.append(Trip(layers, tuple(map(_at_once, together)), sum(decoding for _, decoding in ways)))
    return trips


def _at_once(rounds: Sequence[Round]) -> Round:
    return Round(
        sum(one.busy for one in rounds),
        max(one.latency for one in rounds),
        sum(one.coding for one in rounds),
        sum(one.processor for one in rounds),
    )


def _fused(way: tuple[list[Round], float]) -> tuple[list[Round], float]:
    """Returns an allreduce, which the transport makes of several rounds, as one of them."""
    rounds, decoding = way
    if not rounds:
        return way
    return [replace(_at_once(rounds), latency=sum(one.latency for one in rounds))], decoding


def _way(scheme: Scheme, load: Load, environment: Environment, network: Network) -> tuple[list[Round], float]:
    """Returns the rounds with the coding before each, and the seconds of decoding, as ``costs.predict`` adds them up.

    At most one coding of the whole bucket comes before the first round, and one decoding after the last.
    """
    topology = environment.topology
    one, hosts = cost(scheme, load, topology), np.asarray(topology.hosts)
    bare = replace(network, alpha=0.0, local_alpha=0.0)
    encode, decode = load.dense / network.encode_rate, load.dense / network.decode_rate
    first, last = min(one.encoded, 1.0) * encode, min(one.decoded, 1.0) * decode
    rest = one.encoded * encode + one.decoded * decode - first - last
    between = rest / (one.rounds - 1) if one.rounds > 1 else 0.0
    known: dict[int, Round] = {}  # a ring repeats one flow, which is predicted once
    for flow in one.flows:
        if id(flow) not in known:
            busy = flow.seconds(hosts, bare)
            nbytes = (flow.sent + flow.received + flow.sent_inside + flow.received_inside).max() / 2
            work = network.overhead + environment.byte_seconds * float(nbytes)
            known[id(flow)] = Round(busy, flow.seconds(hosts, network) - busy, between, work)
    rounds = [known[id(flow)] for flow in one.flows]
    if rounds:
        rounds[0] = replace(rounds[0], coding=first)
    return rounds, last if len(rounds) > 1 else last + rest + (0.0 if rounds else first)


# --- readiness of layers -------------------------------------------------------------------------------------


def order_of(position: Sequence[int]) -> list[int]:
    """Returns the exchanged layers by their last exchange bucket, within a bucket in the order of backward."""
    return sorted((i for i, bucket in enumerate(position) if bucket >= 0), key=lambda i: (position[i], -i))


def layer_readiness(
    buckets: Sequence[Sequence[Piece]], layers: int, opened: float, complete: Sequence[float]
) -> Doubles:
    """Returns when each layer's gradient is ready, from the completion times of buckets; 0 for layers in no bucket.

    The completion time is that of the last layer of a bucket. The times of the others are interpolated in proportion to
    the elements before them.
    """
    ready: dict[int, float] = {}
    before = opened
    for number, pieces in enumerate(buckets):
        after = max(before, complete[min(number, len(complete) - 1)])
        total, done = sum(piece.length for piece in pieces), 0
        for piece in pieces:
            done += piece.length
            # A layer that continues in the next bucket is the last of this one, so its first time counts.
            ready.setdefault(piece.layer, before + (after - before) * (done / total if total else 1.0))
        before = after
    if buckets:
        ready[buckets[-1][-1].layer] = max(before, *complete)
    return np.array([ready.get(i, 0.0) for i in range(layers)])
