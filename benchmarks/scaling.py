"""What the alpha-beta model says of reductions and compressors on 2 to 1,024 ranks. A model, no measurement; seconds.

    python benchmarks/scaling.py [--png docs/scaling.png] [--json PATH]

The exchange of one step of ResNet-18 (11.2 M parameters), all of it in one bucket, alone: no overlap with backward, no
compute. `gradcomp.reduce.costs` has the formulas, `docs/algorithms.md` describes them; constants are below. Before
anything is printed, ranks in this process exchange small buckets by every reduction, and what each sends is compared
with the formula: it must be the same, to the byte.

Compressors travel as they do in gradcomp: quantised and half-precision codes by scatter-reduce-allgather, TopK gathered
from all ranks, PowerSGD and float32 summed by the transport (as a ring does). Coding: one pass of the encoder, and one
of the decoder for what arrives; of TopK's N payloads, 1% of a pass each.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import report
from ratios import one_step, resnet18_layers

from gradcomp import Config, LayerSpec, Policy, Quantize
from gradcomp.contrib.figures import drawing, look
from gradcomp.core.scheme import Scheme, parse
from gradcomp.core.topology import Topology
from gradcomp.exchange.layout import build_layout
from gradcomp.exchange.pipeline import Pipeline
from gradcomp.reduce import Part
from gradcomp.reduce.costs import cost, load_of, predict
from gradcomp.reduce.model import Load, Network

RANKS = tuple(2**k for k in range(1, 11))
OF_EACH = 8  # ranks on a host, where there are several
BITS_PER_SECOND = tuple(10.0 ** (7 + k / 4) for k in range(13))
GBIT = 1e9

#: 50 microseconds between hosts, 5 inside one; 5 GB/s inside; one core's codec, float32.
CONSTANTS = Network(
    alpha=50e-6, beta=8 / GBIT, encode_rate=5e9, decode_rate=6e9, local_alpha=5e-6, local_beta=1 / 5e9
)
FREE = dataclasses.replace(CONSTANTS, encode_rate=math.inf, decode_rate=math.inf)

FLAT = ("sra", "ring", "tree", "all_to_all", "gather", "parameter_server")
TWO_LEVELS = ("hierarchical", *FLAT)
SUMMED, GATHERED, REDUCED = "summed", "gathered", "reduced"
COMPRESSORS = {
    "float32, summed": ("none", SUMMED),
    "bf16": ("cast:dtype=bfloat16", REDUCED),
    "8 bits": ("quantize:bits=8", REDUCED),
    "4 bits": ("quantize:bits=4", REDUCED),
    "2 bits": ("quantize:bits=2", REDUCED),
    "TopK 1%": ("topk:density=0.01", GATHERED),
    "PowerSGD 4": ("powersgd:rank=4", SUMMED),
}


@dataclass(frozen=True)
class Panel:
    """One chart: lines by name, in the order of the legend. Both axes are logarithmic."""

    title: str
    x_label: str
    y_label: str
    lines: Mapping[str, Sequence[tuple[float, float]]]
    x_ticks: Mapping[float, str]


def digest(charts: Sequence[Panel]) -> str:
    """Of the numbers drawn, to four digits; a chart carries it in its metadata."""
    numbers = [
        (c.title, name, [f"{x:.4g} {y:.4g}" for x, y in line])
        for c in charts
        for name, line in c.lines.items()
    ]
    return hashlib.sha256(repr(numbers).encode()).hexdigest()


def draw(charts: Sequence[Panel], out: Path) -> None:
    """Two charts in a row; a name has one look in all of them."""
    names = list(dict.fromkeys(name for chart in charts for name in chart.lines))
    with drawing(out, 11, 7, note=digest(charts)) as figure:
        for axis, chart in zip(figure.subplots(2, 2).flat, charts, strict=True):
            for name, line in chart.lines.items():
                axis.plot(*zip(*line, strict=True), **look(names.index(name)), label=name)
            axis.set_xscale("log")
            axis.set_yscale("log")
            axis.set_xticks(list(chart.x_ticks), chart.x_ticks.values())
            axis.minorticks_off()
            axis.set_xlabel(chart.x_label)
            axis.set_ylabel(chart.y_label)
            axis.set_title(chart.title)
            axis.legend(loc="upper left", bbox_to_anchor=(1, 1))


def topology(world: int, of_each: int) -> Topology:
    """Hosts with so many ranks each, the last one perhaps with fewer."""
    return Topology(tuple(rank // of_each for rank in range(world)))


def payload_bytes(layers: list[LayerSpec], compression: str) -> int:
    """One direction's payload of a step."""
    policy = Policy(compression)  # type: ignore[arg-type]  # string forms are resolved
    layout = build_layout(layers, policy.plan(layers), range(len(layers)), frozenset(), 1 << 40)
    return sum(int(group.compressor.wire_bytes(group).sum()) for b in layout.buckets for group in b.groups)


def verify() -> int:
    """Exchange a small bucket among ranks of this process; the number of ranks whose bytes were compared."""
    layers = [LayerSpec("weight", (100, 30)), LayerSpec("bias", (33,), kind="bias")]
    compared = 0
    for name in TWO_LEVELS:
        for world in (2, 5, 16):
            pipelines = exchange(name, layers, world)
            (bucket,) = pipelines[0].layout.buckets
            parts = [
                Part(group.compressor.codec_for(group.table), group, header_index)
                for group, header_index in zip(bucket.groups, bucket.header_index, strict=True)
            ]
            formula = cost(parse(name), load_of(parse(name), parts, len(layers)), topology(world, 4))
            sent = [pipeline.transport.bytes_sent for pipeline in pipelines]
            if sent != formula.bytes_sent().tolist():
                raise SystemExit(f"{name}, {world} ranks: {sent} bytes, formula {formula.bytes_sent()}")
            compared += world
    return compared


def exchange(name: str, layers: list[LayerSpec], world: int) -> list[Pipeline]:
    """One step of all ranks, four on a host, on normal numbers."""
    policy, config = Policy(Quantize(4, 64)), Config(reduction=name, reorder=False)
    return one_step(layers, policy, config, world, topology=topology(world, 4))


def milliseconds(name: str, load: Load, world: int, of_each: int, beta: float) -> float:
    """One reduction's predicted time."""
    network = dataclasses.replace(CONSTANTS, beta=beta)
    return 1e3 * predict(Scheme(name), load, topology(world, of_each), network)


def compressor_milliseconds(load: Load, travels: str, exact: bool, world: int) -> float:
    """One compressor's predicted time, one rank on a host."""
    if travels == REDUCED:
        return 1e3 * predict(Scheme("sra"), load, topology(world, 1), CONSTANTS)
    if travels == GATHERED:
        wire = predict(Scheme("all_to_all"), load, topology(world, 1), FREE)
        passes = 1 / CONSTANTS.encode_rate + (1 + world / 100) / CONSTANTS.decode_rate
    else:
        wire = predict(Scheme("ring"), load, topology(world, 1), FREE)
        passes = 0.0 if exact else 1 / CONSTANTS.encode_rate + 1 / CONSTANTS.decode_rate
    return 1e3 * (wire + load.dense * passes)


def panels() -> list[Panel]:
    """The four charts."""
    layers = resnet18_layers(10)
    dense = sum(layer.nbytes for layer in layers)
    loads = {name: Load(payload_bytes(layers, c), dense) for name, (c, _) in COMPRESSORS.items()}
    four, beta = loads["4 bits"], CONSTANTS.beta
    ranks = {float(n): str(n) for n in RANKS if n in (2, 8, 32, 128, 512)}
    several = [n for n in RANKS if n > OF_EACH]
    rates = {10.0**k: label for k, label in ((7, "10 M"), (8, "100 M"), (9, "1 G"), (10, "10 G"))}
    return [
        Panel(
            "4 bits, one rank a host, 1 Gbit/s",
            "ranks",
            "ms per exchange",
            {name: [(n, milliseconds(name, four, n, 1, beta)) for n in RANKS] for name in FLAT},
            ranks,
        ),
        Panel(
            f"4 bits, {OF_EACH} ranks a host, 1 Gbit/s",
            "ranks",
            "ms per exchange",
            {name: [(n, milliseconds(name, four, n, OF_EACH, beta)) for n in several] for name in TWO_LEVELS},
            {float(n): str(n) for n in several if n != 1024},
        ),
        Panel(
            f"4 bits, 64 ranks, {OF_EACH} a host",
            "bits per second of a host's link",
            "ms per exchange",
            {
                name: [(b, milliseconds(name, four, 64, OF_EACH, 8 / b)) for b in BITS_PER_SECOND]
                for name in TWO_LEVELS
            },
            rates,
        ),
        Panel(
            "Compressors, one rank a host, 1 Gbit/s",
            "ranks",
            "ms per exchange",
            {
                name: [(n, compressor_milliseconds(loads[name], travels, c == "none", n)) for n in RANKS]
                for name, (c, travels) in COMPRESSORS.items()
            },
            ranks,
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--png", type=Path, help="write the charts there")
    parser.add_argument("--json", type=Path, help="write the figures there")
    arguments = parser.parse_args()
    print(f"formulas equal what {verify()} ranks sent, byte for byte", file=sys.stderr)
    charts = panels()
    for chart in charts:
        xs = [x for x, _ in next(iter(chart.lines.values()))]
        rows = [[name, *(f"{y:.1f}" for _, y in line)] for name, line in chart.lines.items()]
        print(f"\n{chart.title}: predicted {chart.y_label} by {chart.x_label}\n")
        print(report.table(["", *(f"{x:.3g}" for x in xs)], rows))
    if arguments.png:
        draw(charts, arguments.png)
    if arguments.json:
        figures = {chart.title: chart.lines for chart in charts}
        report.write_json(arguments.json, {"constants": dataclasses.asdict(CONSTANTS), "predicted": figures})


if __name__ == "__main__":
    main()
