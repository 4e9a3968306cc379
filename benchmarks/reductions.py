"""Bytes and time of every reduction beside its formula, on hosts made of network namespaces. Needs root.

    python benchmarks/reductions.py                                  # 2, 4 and 8 hosts, 100 Mbit/s
    python benchmarks/reductions.py --hosts 4 --reductions sra,ring --slices default,one,524288 --json reductions.json

One rank per host. A gradient of float32, at 4 bits, is exchanged by each reduction in turn: A B C A B C. It is ready
at once, and cut into exchange buckets as training cuts it; `sra`, `ring` and `all_to_all` also exchange it in one
bucket. A time is the median over blocks of the slowest rank's.

Columns
    buckets     exchange buckets; "one bucket" is a row with `slice_elements` above the gradient's size
    bytes       the most that a rank sends, by the interface's counters, without headers of packets (a bare transfer
                measures them before) and without what TCP sent again
    formula     the same by `docs/algorithms.md`, headers of messages included
    off         the largest deviation over ranks, of every rank from its own formula; the bar is 1%
    predicted   the alpha-beta model of a step, `gradcomp.reduce.costs.predict_step`: alpha and beta once from a
                ping-pong of the first two ranks, the overhead of a round from small rounds of all ranks, codec rates
                from one encode and one decode on one core, shared by the ranks that it serves; nothing is fitted to
                a reduction. The bar is 25% for the rows with default slices
    x gloo      time over that of Gloo's float32 allreduce of the same gradient in the same run
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import sys
from pathlib import Path
from typing import Any

import hosts
import numpy as np
import report
from reductions_rank import DEFAULT, DENSE, ONE_BUCKET, Row, Task, run_rank

NAMES = (
    "sra",
    "ring",
    "tree",
    "all_to_all",
    "parameter_server",
    "parameter_server:servers=2",
    "gather",
    "hierarchical",
)
#: Reductions that are also measured in one bucket.
LONE = ("sra", "ring", "all_to_all")
BYTES_BAR, TIME_BAR, SRA_BAR = 0.01, 0.25, 0.14


def asked_rows(reductions: list[str], slices: str | None) -> tuple[Row, ...]:
    """The rows that were asked for: reduction by reduction, with each of the slices."""
    words = {"default": DEFAULT, "one": ONE_BUCKET}
    if slices is not None:
        sizes = [words[text] if text in words else int(text) for text in slices.split(",")]
        return tuple(Row(name, size) for name in reductions for size in sizes)
    return tuple(
        Row(name, size)
        for name in reductions
        for size in ((DEFAULT, ONE_BUCKET) if name in LONE else (DEFAULT,))
    )


def launch(task: Task, count: int, link: str) -> list[dict[str, Any]]:
    """Run a task on hosts of its own; what each rank found."""
    # A packet that the sender's own queue drops is not on its interface's counter: let none be dropped.
    deep = dataclasses.replace(hosts.LINKS[link], queue="2s")
    return hosts.run_task(hosts.Hosts(count, deep), __file__, task, timeout_seconds=1200)


def fit(ping: list[list[float]]) -> tuple[float, float]:
    """alpha and beta of t(n) = alpha + beta n: the time of the smallest message, and the slope of the largest two."""
    seconds = dict(sorted((int(nbytes), each) for nbytes, each in ping))
    smallest, *_, large, largest = seconds
    return seconds[smallest], (seconds[largest] - seconds[large]) / (largest - large)


def evaluate(found: list[dict[str, Any]], task: Task, alpha: float, beta: float) -> list[dict[str, Any]]:
    """One row per row of the task, and Gloo's."""
    from gradcomp.core.scheme import parse
    from gradcomp.core.topology import Topology
    from gradcomp.reduce.costs import cost, predict_step
    from gradcomp.reduce.header import ByteHeader
    from gradcomp.reduce.model import Load, Network

    world = len(found)
    cores = len(os.sched_getaffinity(0))
    codec = found[0]["codec"]
    share = min(1.0, cores / world)  # of a core, that a rank has
    overhead = max(rank["overhead"] for rank in found)
    rates = (4 * codec["encode"] * share, 4 * codec["decode"] * share)
    network = Network(alpha, beta, *rates, overhead=overhead)
    topology = Topology(tuple(range(world)))
    gloo = median_seconds(found, DENSE) if task.dense else None
    rows = []
    for asked in task.rows:
        layout, scheme = found[0]["layouts"][asked.name], parse(asked.reduction)
        buckets = layout["buckets"]
        load = Load(layout["payload_bytes"] / buckets, 4 * task.elements / buckets, ByteHeader.size(1))
        one = cost(scheme, load, topology)
        formula = buckets * one.bytes_sent()
        row = measured_row(found, asked.name, gloo)
        measured = np.array(row["bytes"])
        row |= {
            "default": asked.slice_elements == DEFAULT,
            "buckets": buckets,
            "rounds": one.rounds,
            "encodes": one.encodes,
            "formula": formula.tolist(),
            "counted": [rank["sent"][asked.name] for rank in found],
            "off": float(np.abs(measured - formula).max() / formula.max()),
            "predicted": predict_step(scheme, load, buckets, topology, network),
            "same_bits": len({rank["digests"][asked.name] for rank in found}) == 1,
        }
        row["time_off"] = row["seconds"] / row["predicted"] - 1
        rows.append(row)
    return [*rows, *([measured_row(found, DENSE, gloo)] if task.dense else [])]


def measured_row(found: list[dict[str, Any]], name: str, gloo: float | None) -> dict[str, Any]:
    """What was measured of one row, on all ranks."""
    seconds = median_seconds(found, name)
    return {
        "reduction": name,
        "ranks": len(found),
        "bytes": [statistics.median(rank["rows"][name]["bytes"]) for rank in found],
        "seconds": seconds,
        "processor_seconds": max(statistics.median(rank["rows"][name]["cpu"]) for rank in found),
        "ratio": seconds / gloo if gloo else None,
    }


def median_seconds(found: list[dict[str, Any]], name: str) -> float:
    """The median over blocks of the slowest rank's time."""
    return statistics.median(
        max(times) for times in zip(*(rank["rows"][name]["seconds"] for rank in found), strict=True)
    )


def show(rows: list[dict[str, Any]]) -> str:
    headers = [
        "ranks, reduction",
        "buckets",
        "rounds",
        "encodes",
        "bytes",
        "formula",
        "off %",
        "ms",
        "predicted ms",
        "off %",
        "x gloo",
    ]
    lines = []
    for row in rows:
        model = "predicted" in row
        lines.append(
            [
                label(row),
                row.get("buckets"),
                row.get("rounds"),
                row.get("encodes"),
                f"{max(row['bytes']):,.0f}",
                f"{max(row['formula']):,.0f}" if model else None,
                f"{100 * row['off']:.2f}" if model else None,
                f"{1e3 * row['seconds']:.1f}",
                f"{1e3 * row['predicted']:.1f}" if model else None,
                f"{100 * row['time_off']:+.1f}" if model else None,
                f"{row['ratio']:.3f}" if row["ratio"] else None,
            ]
        )
    return report.table(headers, lines)


def label(row: dict[str, Any]) -> str:
    return f"{row['ranks']}: {row['reduction']}"


def bars(rows: list[dict[str, Any]]) -> tuple[list[str], bool]:
    """Verdicts in words, and whether all bars are met."""
    modelled = [row for row in rows if "predicted" in row]
    bytes_off = [f"{label(r)} {100 * r['off']:.2f}%" for r in modelled if r["off"] > BYTES_BAR]
    time_off = [
        f"{label(r)} {100 * r['time_off']:+.1f}%"
        for r in modelled
        if r["default"] and abs(r["time_off"]) > TIME_BAR
    ]
    slow = [
        f"{label(r)} {r['ratio']:.3f}"
        for r in modelled
        if r["reduction"] == "sra" and r["ranks"] > 2 and r["ratio"] and r["ratio"] > SRA_BAR
    ]
    verdicts = [
        ("bytes within 1% of the formula", bytes_off),
        ("time within 25% of the prediction, with default slices", time_off),
        ("the same bits on all ranks", [label(r) for r in modelled if not r["same_bits"]]),
        (f"sra on 4 and 8 ranks at most {SRA_BAR} x gloo, with default slices", slow),
    ]
    lines = [f"bar: {what}: {'NOT met by ' + ', '.join(by) if by else 'met'}" for what, by in verdicts]
    return lines, not any(by for _, by in verdicts)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hosts", default="2,4,8", help="numbers of hosts (default: 2,4,8)")
    parser.add_argument("--link", choices=hosts.LINKS, default="100mbit")
    parser.add_argument("--reductions", default=",".join(NAMES))
    parser.add_argument(
        "--slices",
        help="for all reductions: default, one (bucket), or elements of a bucket, separated by commas (default: "
        f"default for all, one for {', '.join(LONE)})",
    )
    parser.add_argument("--elements", type=int, default=4 << 20, help="of the gradient (default: 4 Mi)")
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--blocks", type=int, default=3)
    parser.add_argument("--no-gloo", action="store_true", help="leave Gloo's float32 allreduce out")
    parser.add_argument("--json", type=Path)
    options = hosts.parse(parser, lambda task, out: run_rank(Task.from_json(task), out))
    hosts.exit_on_termination()
    found_machine = report.machine()
    print(report.describe(found_machine))
    task = Task(
        asked_rows(options.reductions.split(","), options.slices),
        options.elements,
        options.bits,
        options.blocks,
        not options.no_gloo,
    )
    rows: list[dict[str, Any]] = []
    networks = []
    try:
        for count in map(int, options.hosts.split(",")):
            fitting = tuple(r for r in task.rows if not (r.reduction.endswith("servers=2") and count == 2))
            one = dataclasses.replace(task, rows=fitting)
            found = launch(one, count, options.link)
            alpha, beta = fit(found[0]["ping"])
            measured = {key: found[0][key] for key in ("codec", "link", "overhead")}
            networks.append({"ranks": count, "alpha": alpha, "beta": beta, **measured})
            rows += evaluate(found, one, alpha, beta)
            print(
                f"{count} hosts, {options.link}: alpha {1e3 * alpha:.3f} ms, beta {8e-6 / beta:.1f} Mbit/s, overhead "
                f"{1e3 * max(rank['overhead'] for rank in found):.3f} ms, codec "
                f"{4e-9 * found[0]['codec']['encode']:.2f} GB/s in, {4e-9 * found[0]['codec']['decode']:.2f} GB/s out",
                file=sys.stderr,
            )
    except hosts.HostsError as error:
        print(error, file=sys.stderr)
        return 2
    print(show(rows))
    lines, met = bars(rows)
    print("\n".join(lines))
    report.write_json(
        options.json,
        {"benchmark": "reductions", "machine": found_machine, "networks": networks, "rows": rows},
    )
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
