"""The ranks choose one size of exchange buckets where no setting says how large they are."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from gradcomp.core.config import DEVICE_SLICE, FINE_SLICE, HOST_SLICE, Config
from gradcomp.core.errors import WireFormatError
from gradcomp.core.layers import LayerSpec
from gradcomp.core.plan import Plan
from gradcomp.core.scheme import AUTO, Scheme, parse
from gradcomp.core.topology import Topology
from gradcomp.exchange.layout import build_layout, compressors_of
from gradcomp.exchange.reports import shift
from gradcomp.reduce.costs import cost, predict
from gradcomp.reduce.model import Load, Network
from gradcomp.transport.base import Handle, Transport, wait

#: The processor's seconds of a round of one exchange bucket, and those for each other rank that it sends to: 0.20 and
#: 0.36 ms with 2 and 4 hosts, as the engine's thread and Gloo's took while a model trained on the same cores. They are
#: constants, since a measurement of each run would vary too much for a choice that should be the same in the next run.
ROUND_SECONDS, PEER_SECONDS = 0.12e-3, 0.08e-3
#: A bucket is on the wire for at least so many times the processor's time of its rounds.
LEAST_WIRE = 7
#: A bucket has at least so many elements for each rank: on 8 hosts smaller chunks were slower in every run. A link that
#: seems slow because the processors are busy therefore does not lead to the smallest buckets among many ranks.
RANK_ELEMENTS = 1 << 15

#: Messages of these sizes give the rate of the link, within 0.1 s at 100 Mbit/s.
_PROBE_BYTES = (1 << 10, 1 << 18)
_REPEATS = 3


def agree_on_slices(
    transport: Transport,
    config: Config,
    on_device: bool,
    topology: Topology,
    layers: Sequence[LayerSpec],
    plan: Plan,
    *,
    wait_for: Callable[[Handle], None] = wait,
) -> Config:
    """Return the settings with a size of exchange buckets, the same on all ranks. Collective, after :func:`agree`.

    A setting is taken as it is. Without one, buckets are large if every rank's gradients are on a device: a rank on
    the host would take long over a large one, and hold up the others. If no rank's are, and there are several hosts,
    the rate of the link is measured, and :func:`elements_for` chooses. With ``deterministic`` nothing is measured.
    It raises WireFormatError for an answer that cannot be. Wire: a byte from every rank, if there is no setting; to
    measure, 4 messages of 1 KiB and 4 of 256 KiB per rank, not counted in ``bytes_sent``, and 8 bytes from every rank.
    """
    if config.slice_elements:
        return config
    answers = transport.allgather_bytes(bytes([on_device]), wait_for)
    for rank, answer in enumerate(answers):
        if answer not in (b"\0", b"\1"):
            raise WireFormatError(
                f"rank {rank} sent {answer[:8]!r}, which does not say where its gradients are"
            )
    if all(answer == b"\1" for answer in answers):
        return replace(config, slice_elements=DEVICE_SLICE)
    chosen = HOST_SLICE
    if len(topology.leaders) > 1 and b"\1" not in answers and not config.deterministic:
        chosen = _by_link(transport, config, topology, layers, plan, wait_for)
    return replace(config, slice_elements=chosen)


def elements_for(wire_seconds: float, rounds: int, peers: int) -> int:
    """Return the elements of an exchange bucket: a power of two, between the finest slices and the host's default.

    ``wire_seconds`` is the time for which an element keeps the busiest link busy. A bucket has ``rounds`` rounds, each
    with a message to each of ``peers`` ranks.

    Before the first bucket of a step is encoded, and while the last one is reduced, nothing else fills the link, so
    small buckets leave less of it idle. But every bucket costs the processor a time that does not depend on its size.
    The smallest size is chosen at which a bucket is on the wire for at least LEAST_WIRE times as long, and has at least
    RANK_ELEMENTS for each rank.
    """
    least = LEAST_WIRE * rounds * (ROUND_SECONDS + PEER_SECONDS * peers)
    chosen = FINE_SLICE
    while chosen < HOST_SLICE and (chosen < RANK_ELEMENTS * (peers + 1) or chosen * wire_seconds < least):
        chosen *= 2
    return chosen


def _by_link(
    transport: Transport,
    config: Config,
    topology: Topology,
    layers: Sequence[LayerSpec],
    plan: Plan,
    wait_for: Callable[[Handle], None],
) -> int:
    """Choose by the bytes of the layers that no allreduce adds, and by the measured rate of the link between hosts."""
    compressors = compressors_of(layers, plan)
    # An allreduce of the transport has no gaps that other buckets could fill.
    coded = [i for i, layer in enumerate(layers) if not compressors[i].is_summed(layer)]
    elements = sum(layers[i].size for i in coded)
    if elements <= FINE_SLICE:  # one bucket anyway
        return HOST_SLICE
    layout = build_layout(layers, plan, coded, frozenset(), HOST_SLICE)
    scheme = parse(config.reduction)
    if scheme.name == AUTO:
        scheme = Scheme("sra")
    load = Load(sum(bucket.payload_bytes for bucket in layout.buckets), 4 * elements)
    beta = _seconds_per_byte(transport, topology, wait_for)
    wire = predict(scheme, load, topology, Network(0.0, beta, math.inf, math.inf))
    return elements_for(wire / elements, cost(scheme, load, topology).rounds, transport.size - 1)


def _seconds_per_byte(transport: Transport, topology: Topology, wait_for: Callable[[Handle], None]) -> float:
    """Measure the slowest link to a next rank on another host; all ranks get the same figure. Collective."""
    small, large = (shift(transport, n, wait_for, repeats=_REPEATS, choose=min) for n in _PROBE_BYTES)
    sent_before = transport.bytes_sent
    answers = transport.allgather_bytes(np.float64(large - small).tobytes(), wait_for)
    transport.bytes_sent = sent_before
    after = np.roll(np.asarray(topology.hosts), -1)
    slowest = 0.0
    for rank, answer in enumerate(answers):
        if len(answer) != 8 or not math.isfinite(seconds := float(np.frombuffer(answer, np.float64)[0])):
            raise WireFormatError(f"rank {rank} sent {answer[:8]!r}, which is not the time of a message")
        if topology.hosts[rank] != after[rank]:
            slowest = max(slowest, seconds)
    return slowest / (_PROBE_BYTES[1] - _PROBE_BYTES[0])
