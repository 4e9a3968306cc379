"""Ranks simulated in one thread: what they send is compared with the formulas, and their work is timed.

Work is processor time of one rank on one core, without the transport: it encodes, decodes, writes and reads headers,
and runs the step protocol. It is measured, not modelled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from time import perf_counter, process_time
from typing import Any

import numpy as np
from scaling_model import (
    FAMILIES,
    GATHERED,
    LED,
    REDUCED,
    REDUCTIONS,
    SUMMED,
    Constants,
    Family,
    Sizes,
    hosts_of,
)

from gradcomp import Config, Filter, LayerSpec, Policy
from gradcomp.core.scheme import parse
from gradcomp.core.topology import Topology
from gradcomp.exchange.arrivals import Submission
from gradcomp.exchange.layout import build_layout
from gradcomp.exchange.pipeline import Pipeline
from gradcomp.exchange.settings import Settings
from gradcomp.exchange.waiting import Waiting
from gradcomp.kernels.codec import Draw
from gradcomp.kernels.devices import HOST
from gradcomp.reduce import Part
from gradcomp.reduce.costs import cost, load_of
from gradcomp.reduce.header import ByteHeader, CountHeader, padded
from gradcomp.transport.inprocess import World

#: No layer is too small to be compressed.
ALL = Filter(min_elements=0, min_dimensions=0, exclude_kinds=())
SMALL = [LayerSpec(f"weight{i}", (64, 32)) for i in range(4)]
FULL = [LayerSpec(f"weight{i}", (512, 256)) for i in range(8)]  # fill a bucket of the default size


class TimedWorld(World):
    """Counts the processor time in which it moves the messages of all ranks."""

    spent = 0.0

    def _carry_out(self, calls: list[Any]) -> None:
        begin = process_time()
        super()._carry_out(calls)
        self.spent += process_time() - begin


class Ranks:
    """The pipelines of all ranks of a simulated job, with gradients of normal numbers."""

    def __init__(
        self, layers: Sequence[LayerSpec], compression: str, reduction: str, topology: Topology
    ) -> None:
        self.world = TimedWorld(topology.world)
        policy = Policy(compression, filter=ALL)  # type: ignore[arg-type]  # string forms are resolved
        plan, config = policy.plan(layers), Config(reduction=reduction, reorder=False)
        settings = Settings(topology=topology)
        self.pipelines = [
            Pipeline(layers, plan, transport, config, _nowhere, settings)
            for transport in self.world.transports()
        ]
        draws = np.random.default_rng(0)
        self.gradients = [draws.standard_normal(layer.size, np.float32) for layer in layers]

    def step(self) -> tuple[float, int]:
        """Run a step; return the mean seconds of a rank, without the transport, and the bytes that rank 0 sent."""
        before, self.world.spent = self.pipelines[0].transport.bytes_sent, 0.0
        begin = process_time()
        for pipeline in self.pipelines:
            pipeline.open()
            for number, gradient in enumerate(self.gradients):
                address, means = gradient.ctypes.data, np.empty_like(gradient)
                pipeline.arrivals.submit(Submission(number, address, means.ctypes.data, (gradient, means)))
            pipeline.arrivals.flush()
        still = self.pipelines
        while still:
            still = [pipeline for pipeline in still if pipeline.poll() is not Waiting.NOTHING]
        for pipeline in self.pipelines:
            pipeline.commit()
        seconds = (process_time() - begin - self.world.spent) / len(self.pipelines)
        return seconds, self.pipelines[0].transport.bytes_sent - before

    def sent(self) -> list[int]:
        """The bytes that every rank has sent so far."""
        return [pipeline.transport.bytes_sent for pipeline in self.pipelines]


def _nowhere(layer: int) -> int:
    raise AssertionError(f"layer {layer} has a gradient on every rank")


def parts_of(layers: Sequence[LayerSpec], compression: str) -> list[Part]:
    """The groups of the one bucket of these layers, with codecs."""
    (bucket,) = layout_of(layers, compression)
    return [
        Part(group.compressor.codec_for(group.table), group, header_index)
        for group, header_index in zip(bucket.groups, bucket.header_index, strict=True)
    ]


def layout_of(layers: Sequence[LayerSpec], compression: str) -> Any:
    """The buckets of these layers."""
    policy = Policy(compression, filter=ALL)  # type: ignore[arg-type]  # string forms are resolved
    return build_layout(layers, policy.plan(layers), range(len(layers)), frozenset(), 1 << 20).buckets


# ---- bytes


def verify(worlds: Sequence[int] = (2, 5, 16), of_each: int = 4) -> int:
    """Exchange a small bucket by every family and reduction; return how many ranks sent what the formulas say.

    SystemExit names the first difference of even a byte.
    """
    compared = 0
    for name, family in FAMILIES.items():
        for reduction in REDUCTIONS if family.travels == REDUCED else ("sra",):
            if family.votes and reduction in ("ring", "tree", "hierarchical"):
                continue
            for world in worlds:
                topology = hosts_of(world, of_each)
                ranks = Ranks(SMALL, family.compression, reduction, topology)
                ranks.step()  # sizes that depend on data are not known before the first step
                before = np.array(ranks.sent())
                ranks.step()
                sent = (np.array(ranks.sent()) - before).tolist()
                formula = bytes_of(family, reduction, topology)
                if sent != formula:
                    raise SystemExit(
                        f"{name}, {reduction}, {world} ranks sent {sent} bytes, by formula {formula}"
                    )
                compared += world
    return compared


def bytes_of(family: Family, reduction: str, topology: Topology) -> list[int]:
    """The bytes that each rank sends for the small bucket, headers included, in the second step."""
    world, layers = topology.world, len(SMALL)
    (bucket,) = layout_of(SMALL, family.compression)
    header, counts = ByteHeader.size(layers), 4 * CountHeader(layers).length
    if family.travels == REDUCED:
        load = load_of(parse(reduction), parts_of(SMALL, family.compression), layers)
        return [round(n) for n in cost(parse(reduction), load, topology).bytes_sent()]
    payload = bucket.payload_bytes
    if family.travels == GATHERED:  # one group, whose size travels in 8 bytes that are padded to 16
        return [(world - 1) * (header + padded(padded(8) + payload))] * world
    if family.travels == SUMMED:
        sums = [payload] if family.sums == 1 else sums_of(bucket)
        return [sum(2 * (n + counts * (i == 0)) * (world - 1) // world for i, n in enumerate(sums))] * world
    (group,) = bucket.groups
    traffic = group.compressor.traffic(group)
    summed = 2 * int(traffic.summed.sum()) * (world - 1) // world
    led = padded(int(traffic.led.sum()))
    return [(world - 1) * (header + led * (rank == 1 % world)) + summed for rank in range(world)]


def sums_of(bucket: Any) -> list[int]:
    """The bytes of PowerSGD's two sums: the left factors, then the right ones."""
    shapes = [shape for group in bucket.groups for shape in group.shapes]
    rank = bucket.groups[0].compressor.rank
    return [4 * rank * sum(rows for rows, _ in shapes), 4 * rank * sum(columns for _, columns in shapes)]


# ---- time


def measure(alpha: float, local_alpha: float, local_rate: float) -> Constants:
    """Measure this core's work, and return it with the constants of the network that are given."""
    few, many = 8, 64
    small = {r: {n: _work(SMALL, "quantize:bits=4", r, n) for n in (few, many)} for r in ("sra", "ring")}
    slope = {r: (times[many] - times[few]) / (many - few) for r, times in small.items()}
    message = slope["sra"] / 4  # a further rank is two messages sent, and two received
    round_ = max((slope["ring"] - slope["sra"]) / 2, 0.0)
    bucket = max(small["sra"][few] - 4 * (few - 1) * message, 0.0)
    rates = {
        name: _rates(family.compression) for name, family in FAMILIES.items() if family.travels == REDUCED
    }
    work = {}
    for name, family in FAMILIES.items():
        if family.travels in (GATHERED, LED) or family.sums > 1:
            two, more = (_work(FULL, family.compression, "sra", n) for n in (2, 18))
            each = max((more - two) / 16, 0.0) if family.travels == GATHERED else 0.0
            work[name] = (two - 2 * each, each)
    return Constants(alpha, local_alpha, local_rate, message, round_, bucket, rates, work)


def _work(layers: Sequence[LayerSpec], compression: str, reduction: str, world: int) -> float:
    ranks = Ranks(layers, compression, reduction, hosts_of(world, 1))
    ranks.step()
    return min(ranks.step()[0] for _ in range(4))


def _rates(compression: str) -> tuple[float, float]:
    """Bytes of float32 that a core encodes and decodes in a second."""
    (part,) = parts_of(FULL, compression)
    table = part.group.table.copy()
    values = np.random.default_rng(0).standard_normal(int(table["length"].sum()), np.float32)
    means = np.empty_like(values)
    starts = 4 * (np.cumsum(table["length"]) - table["length"])
    table["gradient"], table["output"] = values.ctypes.data + starts, means.ctypes.data + starts
    sizes = part.codec.wire_bytes(table)
    table["payload"] = np.cumsum(sizes) - sizes
    payload, flags = np.zeros(int(sizes.sum()), np.uint8), np.zeros(len(table), np.uint8)
    encode = fastest(lambda: part.codec.encode(HOST, table, payload, flags, Draw(0, 0, 0)))
    decode = fastest(lambda: part.codec.decode(HOST, table, payload, flags))
    return values.nbytes / encode, values.nbytes / decode


def fastest(work: Callable[[], Any]) -> float:
    """The least seconds of some runs: others use the core too, and none makes it faster."""
    seconds = []
    for _ in range(15):
        begin = perf_counter()
        work()
        seconds.append(perf_counter() - begin)
    return min(seconds)


def sizes_of(family: Family) -> Sizes:
    """The bytes of a full bucket of eight layers of 512 x 256; chunks are cut as the reductions cut them."""
    (bucket,) = layout_of(FULL, family.compression)
    dense, header = 4.0 * bucket.elements, ByteHeader.size(len(FULL))
    if family.travels == REDUCED:
        parts, scheme = parts_of(FULL, family.compression), parse("sra")
        load = load_of(scheme, parts, len(FULL))
        assert load.cut is not None, "made by load_of"
        return Sizes(load.payload, dense, header, cut=cache(load.cut))
    if family.travels == LED:
        (group,) = bucket.groups
        traffic = group.compressor.traffic(group)
        return Sizes(float(traffic.summed.sum()), dense, led=float(traffic.led.sum()))
    return Sizes(float(bucket.payload_bytes), dense, header if family.travels == GATHERED else 0)
