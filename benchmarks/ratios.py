"""Compression ratios on the layers of ResNet-18, beside those of the papers. No training, no network; seconds.

    python benchmarks/ratios.py [--json PATH]

ratio = bytes of the gradients in float32 / payload bytes, per step and direction. Payloads are those of the buckets
that gradcomp lays out, by each compressor's formula, with all that travels: scales, indices, and the layers that travel
exactly (biases and batch normalisation, and what a compressor does not think worth it).

Columns
    ratio       all of that; what the papers count (Vogels et al. 2019 sends vectors "uncompressed", and counts them)
    without     the same without the layers that travel exactly, in both bytes
    headers     what gradcomp adds for its step protocol, per rank and step, with two ranks. Measured: two ranks
                exchange normal numbers in one process, and what one sends is compared with the formula. With two ranks
                a rank sends exactly one payload
    sent        ratio of what was sent, headers and all

Where no formula knows the bytes (DEFLATE), only what was sent is given, for normal numbers.

Settings: Vogels et al. 2019, Table 3, is on CIFAR-10; Markov et al. 2024, Table 2, trains ResNet-18 on CIFAR-100.
Both are the ResNet-18 for 32 x 32 images. The papers do not state the bucket of their 4 bits: 512 values with 4 bytes
of scale and 1,024 with 8 give the same bytes. The exit status is 1 if a bar is missed or its row could not run.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import compressions
import models
import numpy as np
import report

from gradcomp import Config, LayerSpec, Policy
from gradcomp.exchange.arrivals import Submission
from gradcomp.exchange.layout import build_layout
from gradcomp.exchange.pipeline import Pipeline
from gradcomp.exchange.settings import Settings
from gradcomp.exchange.waiting import Waiting
from gradcomp.torch.layers import spec
from gradcomp.transport.inprocess import World

WORLD = 2  # ranks of the exchange that is measured


@dataclass(frozen=True)
class Row:
    """A compression; ``paper``: the ratio to be reproduced within ``bar`` (relative), if there is one."""

    title: str
    compression: str
    paper: float | None = None
    bar: float | None = None
    formula: bool = True


@dataclass(frozen=True)
class Table:
    """Rows on the layers of ResNet-18 with so many classes."""

    title: str
    classes: int
    rows: tuple[Row, ...]


TABLES = (
    Table(
        "ResNet-18, CIFAR-10 (Vogels et al. 2019, Table 3)",
        10,
        tuple(
            Row(f"PowerSGD, rank {rank}", f"powersgd:rank={rank}", paper, 0.005)
            for rank, paper in ((1, 243.0), (2, 136.0), (4, 72.0))
        ),
    ),
    Table(
        "ResNet-18, CIFAR-100 (Markov et al. 2024, Table 2)",
        100,
        (
            Row(
                "4 bits, linf, bucket 512 + 4 bytes",
                "quantize:bits=4,bucket_size=512,scaling=linf",
                7.8,
                0.01,
            ),
            Row("4 bits, minmax, bucket 1024 + 8 bytes", "quantize:bits=4,bucket_size=1024", 7.8, 0.01),
            Row("4 bits, our default: minmax, bucket 512 + 8 bytes", "quantize:bits=4"),
            Row("TopK 1%, 32-bit indices", "topk:density=0.01,indices=raw", 48.1, 0.01),
            Row("TopK 1%, our index coding", "topk:density=0.01"),
            Row("TopK 1%, DEFLATE", "topk:density=0.01,indices=deflate", formula=False),
            Row("PowerSGD, rank 4", "powersgd:rank=4", 72.2, 0.01),
        ),
    ),
)


@dataclass(frozen=True)
class Count:
    """Bytes per step: one direction's payload, and what one of two ranks sends in all."""

    dense_bytes: int
    compressed_bytes: int
    exact_bytes: int
    sent_bytes: int

    @property
    def payload_bytes(self) -> int:
        """All of a payload."""
        return self.compressed_bytes + self.exact_bytes

    @property
    def ratio(self) -> float:
        """With the layers that travel exactly."""
        return self.dense_bytes / self.payload_bytes

    @property
    def ratio_without(self) -> float:
        """Without them."""
        return (self.dense_bytes - self.exact_bytes) / self.compressed_bytes

    @property
    def header_bytes(self) -> int:
        """What is no payload."""
        return self.sent_bytes - self.payload_bytes


def resnet18_layers(classes: int) -> list[LayerSpec]:
    """Its layers, as gradcomp's frontend sees them."""
    model = models.ResNet((2, 2, 2, 2), 64, classes)
    return [spec(name, parameter) for name, parameter in model.named_parameters()]


def count(layers: Sequence[LayerSpec], compression: str) -> Count:
    """Bytes of a step under this compression with the default filter."""
    policy = Policy(compression)  # type: ignore[arg-type]  # string forms are resolved
    config = Config()
    layout = build_layout(layers, policy.plan(layers), range(len(layers)), frozenset(), config.slice_elements)
    exact_layers = [i for i, layer in enumerate(layers) if layer.name in policy.excluded(layers)]
    exact = compressed = 0
    for bucket in layout.buckets:
        for group in bucket.groups:
            sizes = group.compressor.wire_bytes(group)
            is_exact = np.isin(group.layers, exact_layers)
            exact += int(sizes[is_exact].sum())
            compressed += int(sizes[~is_exact].sum())
    dense = sum(layer.nbytes for layer in layers)
    return Count(dense, compressed, exact, sent_bytes(layers, policy, config))


def sent_bytes(layers: Sequence[LayerSpec], policy: Policy, config: Config) -> int:
    """Bytes that a rank sends in one step of two ranks in this process, on normal numbers; the mean of both."""
    pipelines = one_step(layers, policy, config, WORLD, order_step=-1)
    return sum(pipeline.transport.bytes_sent for pipeline in pipelines) // WORLD


def one_step(
    layers: Sequence[LayerSpec], policy: Policy, config: Config, world: int, **options: Any
) -> list[Pipeline]:
    """The pipelines of ``world`` ranks in this process after a step on normal numbers."""
    pipelines = []
    for transport in World(world).transports():
        pipeline = Pipeline(layers, policy.plan(layers), transport, config, _no_room, Settings(**options))
        pipeline.open()
        draws = np.random.default_rng(transport.rank)
        for number, layer in enumerate(layers):
            gradient = draws.standard_normal(layer.size, np.float32)
            address = gradient.ctypes.data
            pipeline.arrivals.submit(Submission(number, address, address, gradient))
        pipeline.arrivals.flush()
        pipelines.append(pipeline)
    still = pipelines
    while still:
        still = [pipeline for pipeline in still if pipeline.poll() is not Waiting.NOTHING]
    return pipelines


def _no_room(layer: int) -> int:
    raise AssertionError(f"layer {layer} has a gradient on every rank")


def measure(table: Table) -> list[dict[str, Any]]:
    """One dictionary per row; ``verdict``: met, MISSED, or why the row could not run; None without a bar."""
    layers = resnet18_layers(table.classes)
    found = []
    for row in table.rows:
        result: dict[str, Any] = {"table": table.title, **dataclasses.asdict(row), "verdict": None}
        found.append(result)
        reason = compressions.why_not(row.compression)
        if reason is not None:
            result["verdict"] = f"not run: {reason}"
            continue
        counted = count(layers, row.compression)
        result |= dataclasses.asdict(counted)
        result["sent_ratio"] = counted.dense_bytes / counted.sent_bytes
        if not row.formula:
            continue
        result |= {
            "ratio": counted.ratio,
            "ratio_without": counted.ratio_without,
            "header_bytes": counted.header_bytes,
        }
        if row.paper is not None and row.bar is not None:
            result["difference"] = counted.ratio / row.paper - 1
            result["verdict"] = "met" if abs(result["difference"]) <= row.bar else "MISSED"
    return found


def show(rows: list[dict[str, Any]]) -> str:
    """The Markdown table."""

    def number(row: dict[str, Any], name: str, form: str) -> str | None:
        return None if row.get(name) is None else format(row[name], form)

    headers = ["row", "paper", "ratio", "difference", "bar", "", "without", "payload bytes", "exact bytes",
               "headers", "sent"]  # fmt: skip
    cells = []
    for row in rows:
        payload = row["compressed_bytes"] + row["exact_bytes"] if "ratio" in row else None
        bar = row["bar"]
        cells.append(
            [
                row["title"],
                row["paper"],
                number(row, "ratio", ".2f"),
                number(row, "difference", "+.2%"),
                None if bar is None else f"{bar:.1%}",
                row["verdict"] if row["verdict"] is None else row["verdict"].partition(":")[0],
                number(row, "ratio_without", ".2f"),
                None if payload is None else f"{payload:,}",
                number(row, "exact_bytes", ","),
                number(row, "header_bytes", ","),
                number(row, "sent_ratio", ".2f"),
            ]
        )
    return report.table(headers, cells)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write all figures here")
    options = parser.parse_args()
    found: list[dict[str, Any]] = []
    for table in TABLES:
        rows = measure(table)
        parameters = sum(layer.size for layer in resnet18_layers(table.classes))
        print(f"{table.title}: {parameters:,} parameters\n{show(rows)}\n")
        for row in rows:
            if row["verdict"] is not None and row["verdict"].startswith("not run"):
                print(f"{row['title']}: {row['verdict']}", file=sys.stderr)
        found += rows
    barred = [row for row in found if row["bar"] is not None]
    met = sum(row["verdict"] == "met" for row in barred)
    print(f"{met} of {len(barred)} bars met")
    report.write_json(options.json, {"benchmark": "ratios", "machine": report.machine(), "rows": found})
    return 0 if met == len(barred) else 1


if __name__ == "__main__":
    sys.exit(main())
