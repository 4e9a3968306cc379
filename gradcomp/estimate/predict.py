"""Predicts the step of every choice from a model's layers, the time of backward and the network.

The simulation is the one that ``compression="auto"`` uses. DistributedDataParallel goes through it with its own
exchange buckets and costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from gradcomp.compress.policy import resolve
from gradcomp.control.base import Doubles, Environment
from gradcomp.control.distortion.round_trip import Rates, measure_rates
from gradcomp.control.forecast import Job, assignment, completion, plan_trips
from gradcomp.control.step_time import Round, Trip, simulate
from gradcomp.core.config import DEVICE_SLICE, HOST_SLICE
from gradcomp.core.layers import Filter, LayerSpec
from gradcomp.core.scheme import AUTO, Scheme
from gradcomp.core.topology import Topology
from gradcomp.estimate.choices import CHOICES, DDP, LOCAL_CHOICES, Choice, Kind
from gradcomp.exchange.slices import PEER_SECONDS, ROUND_SECONDS, elements_for
from gradcomp.reduce.costs import cost
from gradcomp.reduce.model import Load, Network
from gradcomp.transport.base import GLOO_BYTE_SECONDS

#: DDP's first bucket and the others, in bytes: each takes gradients until it has so many.
_DDP_BUCKETS = (1 << 20, 25 << 20)
_HOOK_RANK = 4
#: The payload's share of what travels over Ethernet with packets of 1,500 bytes.
PAYLOAD = 1448 / 1538
#: A step is shorter by at least this fraction of it, or nothing is gained.
LEAST_GAIN = 0.05
_EMBEDDINGS = ("embed", "wte", "wpe")


@dataclass(frozen=True)
class Processor:
    """Describes the processor that computes a rank's gradients and codes them.

    ``on_device``: a GPU computes. ``shared``: the exchange takes turns with the computing, as on CPUs all of whose
    cores train. ``rates``: by choice, bytes of float32 that its codec encodes, and decodes, a second. ``copy``: bytes a
    second at which DDP copies.
    ``byte_seconds``: seconds for a byte sent and one received; ``round_seconds``: those of a collective;
    ``peer_seconds``: those for each rank that it sends to. ``half_seconds``: what a value costs DDP's fp16 hook beside
    the copies, ``powersgd_seconds`` what it costs DDP's PowerSGD hook. ``skew``: the part of a step without exchange by
    which the slowest rank of each step is later than the median rank.
    """

    on_device: bool
    shared: bool
    rates: dict[str, Rates]
    copy: float
    byte_seconds: float
    round_seconds: float
    peer_seconds: float
    half_seconds: float
    powersgd_seconds: float
    skew: float


def host_processor(shared: bool = True) -> Processor:
    """Returns this machine's processor: codecs are measured, the rest was measured with Gloo (``docs/estimate.md``)."""
    rates = {c.key: measure_rates(resolve(c.how)) for c in (*CHOICES, *LOCAL_CHOICES) if c.kind != "ddp"}
    return Processor(
        on_device=False,
        shared=shared,
        rates=rates,
        copy=5e9,
        byte_seconds=GLOO_BYTE_SECONDS,
        round_seconds=ROUND_SECONDS,
        peer_seconds=PEER_SECONDS,
        half_seconds=2.5e-9,
        powersgd_seconds=9e-9,
        skew=0.05,
    )


def device_processor(codec_rate: float = 100e9) -> Processor:
    """Returns a GPU whose codecs encode and decode ``codec_rate`` bytes of float32 a second: assumed, not measured.

    PyTorch's PowerSGD hook is taken to read and write as much as ten codings of 4 bytes a value.
    """
    rates = {c.key: Rates(codec_rate, codec_rate) for c in (*CHOICES, *LOCAL_CHOICES) if c.kind != "ddp"}
    return Processor(
        on_device=True,
        shared=False,
        rates=rates,
        copy=codec_rate,
        byte_seconds=0.0,
        round_seconds=0.05e-3,
        peer_seconds=0.0,
        half_seconds=0.0,
        powersgd_seconds=40 / codec_rate,
        skew=0.02,
    )


@dataclass(frozen=True)
class Situation:
    """A model, its time and its network: all that an estimate needs.

    ``backward`` and ``alone`` are seconds of the backward pass and of a step without exchange. ``ready`` has, by
    layer, the seconds from the begin of backward until its gradient is there.
    """

    layers: Sequence[LayerSpec]
    ready: Doubles
    backward: float
    alone: float
    topology: Topology
    network: Network
    processor: Processor

    @property
    def seconds_per_byte(self) -> float:
        """Returns those of the link between hosts, or between ranks where there is one host."""
        return self.network.beta if len(self.topology.leaders) > 1 else self.network.local_beta


@dataclass(frozen=True)
class Estimate:
    """One choice: bytes that a machine sends in a step, seconds of a step, exposed seconds, and bytes of memory.

    Where there is one machine, the bytes are those of a rank.
    """

    choice: Choice
    sent: float
    step: float
    exposed: float
    memory: float


def reduction(topology: Topology) -> str:
    """Returns the reduction to use: the fastest one where several ranks share the link of a machine."""
    hosts = len(topology.leaders)
    return AUTO if 1 < hosts < topology.world else "sra"


def work_of(layers: Sequence[LayerSpec]) -> Doubles:
    """Returns the share of backward that each layer takes.

    The shares are in proportion to elements, as the layers of a transformer or an LSTM multiply each weight once for
    every token. Where some layers are convolutions they take equal shares, since a stage with more channels has fewer
    places. Embeddings take none, and become ready last.
    """
    convolutions = np.array([len(layer.shape) >= 4 for layer in layers])
    if convolutions.any():
        work = convolutions.astype(np.float64)
    else:
        work = np.array(
            [
                0.0
                if len(layer.shape) < 2 or any(word in layer.name.lower() for word in _EMBEDDINGS)
                else layer.size
                for layer in layers
            ],
            dtype=np.float64,
        )
    if not work.any():
        work = np.array([float(layer.size) for layer in layers])
    shares: Doubles = work / work.sum()
    return shares


def readiness(layers: Sequence[LayerSpec], backward: float) -> Doubles:
    """Returns when each layer's gradient is there: backward goes through the layers from the last to the first."""
    times: Doubles = backward * np.cumsum(work_of(layers)[::-1])[::-1]
    return times


def estimate(situation: Situation, every: int | None = None) -> list[Estimate]:
    """Returns an estimate of every choice, in the order of CHOICES.

    With ``every`` those of LOCAL_CHOICES follow, in rounds of so many steps.
    """
    elements = sum(layer.size for layer in situation.layers)
    made = []
    for choice in CHOICES:
        trips, sent = (_ddp if choice.kind == "ddp" else _gradcomp)(choice, situation)
        step = _step(trips, situation) if situation.topology.world > 1 else situation.alone
        made.append(Estimate(choice, sent, step, step - situation.alone, choice.memory * elements))
    if every is not None:
        made += [_local(choice, situation, every, choice.memory * elements) for choice in LOCAL_CHOICES]
    return made


def best(estimates: Sequence[Estimate], *, alike: bool = False, kind: Kind = "gradcomp") -> Estimate:
    """Returns gradcomp's fastest choice; with ``alike`` only of those that trained as without compression."""
    own = [one for one in estimates if one.choice.kind == kind and (one.choice.alike or not alike)]
    return min(own, key=lambda one: one.step)


def gains(estimates: Sequence[Estimate], kind: Kind = "gradcomp") -> bool:
    """Returns true if gradcomp's fastest choice is shorter than DDP by at least LEAST_GAIN of DDP's step."""
    (ddp,) = (one for one in estimates if one.choice is DDP)
    return best(estimates, kind=kind).step < (1 - LEAST_GAIN) * ddp.step


def _step(trips: Sequence[Trip], situation: Situation) -> float:
    shared = situation.processor.shared
    made = simulate(completion(situation.ready, trips), trips, shared)
    end = max(made.end, situation.backward + made.taken[-1])
    return situation.alone - situation.backward + end + situation.processor.skew * situation.alone


def _local(choice: Choice, situation: Situation, every: int, memory: float) -> Estimate:
    """Returns an estimate of local steps. Nothing hides the exchange after a round's last one.

    Ranks wait for the slowest one once a round. The lateness of a sum of ``every`` steps grows with its root.
    """
    if situation.topology.world == 1:
        return Estimate(choice, 0.0, situation.alone, 0.0, memory)
    at_once = replace(situation, ready=np.zeros(len(situation.layers)), backward=0.0)
    trips, sent = _gradcomp(choice, at_once)
    exchange = simulate(completion(at_once.ready, trips), trips, situation.processor.shared).end
    exposed = exchange / every + situation.processor.skew * situation.alone / every**0.5
    return Estimate(choice, sent / every, situation.alone + exposed, exposed, memory)


def _gradcomp(choice: Choice, situation: Situation) -> tuple[list[Trip], float]:
    """Returns the exchange buckets of one of gradcomp's choices, and the bytes that a machine sends."""
    layers, topology, processor = situation.layers, situation.topology, situation.processor
    compressor, kept = resolve(choice.how), Filter()
    own = [None if kept.reason_to_exclude(layer) else compressor for layer in layers]
    order = sorted(range(len(layers)), key=lambda i: (situation.ready[i], -i))
    environment = Environment(
        layers,
        own,
        0,
        topology,
        Scheme(reduction(topology)),
        shared_core=processor.shared,
        byte_seconds=processor.byte_seconds,
        slice_elements=DEVICE_SLICE,
    )
    peers = topology.world - 1
    network = replace(situation.network, overhead=processor.round_seconds + processor.peer_seconds * peers)
    job = Job(environment, order, situation.ready)
    if not processor.on_device:  # buckets by the link, as ranks choose them
        trips = plan_trips(job, compressor, processor.rates[choice.key], network)
        elements = sum(layers[i].size for i in order)
        coded = any(
            c is not None and not c.is_summed(layers[i])
            for i, c in enumerate(assignment(environment, compressor))
        )
        busy = sum(one.busy for trip in trips for one in trip.rounds)
        rounds = max(len(trip.rounds) for trip in trips)
        size = (
            elements_for(busy / elements, rounds, peers)
            if coded and len(topology.leaders) > 1
            else HOST_SLICE
        )
        job = replace(job, environment=replace(environment, slice_elements=size))
    trips = plan_trips(job, compressor, processor.rates[choice.key], network)
    return trips, _sent(trips, situation)


def _sent(trips: Sequence[Trip], situation: Situation) -> float:
    return sum(one.busy for trip in trips for one in trip.rounds) / situation.seconds_per_byte


def _ddp(choice: Choice, situation: Situation) -> tuple[list[Trip], float]:
    """Returns DDP's buckets, each of which a ring sums, and the bytes that a machine sends."""
    layers, processor = situation.layers, situation.processor
    order = sorted(range(len(layers)), key=lambda i: (situation.ready[i], -i))
    whole = choice.how == "powersgd"  # the hook gets one bucket: with several it may hang on Gloo
    trips = []
    members: list[int] = []
    nbytes = 0
    limit = _DDP_BUCKETS[0]
    for position, layer in enumerate(order, 1):
        members.append(layer)
        nbytes += layers[layer].nbytes
        if position < len(order) and (whole or nbytes < limit):
            continue
        limit = _DDP_BUCKETS[1]
        travels = _hook_bytes(choice, [layers[i] for i in members])
        one, busy, latency = _ring(travels, situation)
        work = nbytes / processor.copy  # into the bucket, and later out of it
        values = nbytes / 4
        if choice.how == "half":
            work += processor.half_seconds * values / 2
        if choice.how == "powersgd":
            work += processor.powersgd_seconds * values / 2
        processing = processor.round_seconds + processor.byte_seconds * one
        trips.append(Trip(tuple(members), (Round(busy, latency, work, processing),), work))
        members, nbytes = [], 0
    return trips, _sent(trips, situation)


def _hook_bytes(choice: Choice, layers: Sequence[LayerSpec]) -> float:
    """Returns the bytes of a bucket that DDP's hook sums."""
    if choice.how == "half":
        return sum(layer.nbytes for layer in layers) / 2
    if choice.how != "powersgd":
        return float(sum(layer.nbytes for layer in layers))
    total = 0.0
    for layer in layers:
        rows = layer.shape[0] if layer.shape else 1
        columns = layer.size // max(rows, 1)
        low = 4.0 * _HOOK_RANK * (rows + columns)
        total += low if len(layer.shape) > 1 and 2 * low < layer.nbytes else layer.nbytes
    return total


def _ring(nbytes: float, situation: Situation) -> tuple[float, float, float]:
    """Returns the bytes that a rank sends in a ring allreduce, the seconds on the link, and those of latency."""
    hosts, network = np.asarray(situation.topology.hosts), situation.network
    flows = cost(Scheme("ring"), Load(nbytes, nbytes), situation.topology).flows
    if not flows:
        return 0.0, 0.0, 0.0
    one = flows[0]  # all rounds are alike
    bare = one.seconds(hosts, replace(network, alpha=0.0, local_alpha=0.0))
    sent = float((one.sent + one.sent_inside).max()) * len(flows)
    return sent, bare * len(flows), (one.seconds(hosts, network) - bare) * len(flows)
