"""Bytes and time of every reduction beside its formula, on hosts made of network namespaces. Needs root.

    python benchmarks/reductions.py                                  # 2, 4 and 8 hosts, 100 Mbit/s
    python benchmarks/reductions.py --hosts 4 --reductions sra,ring --blocks 5 --json reductions.json

One rank per host. A gradient of float32, in one bucket at 4 bits, is exchanged by each reduction in turn: A B C A B C.
A time is the median over blocks of the slowest rank's.

Columns
    bytes       the most that a rank sends, by the interface's counters, without headers of packets (a bare transfer
                measures them before) and without what TCP sent again
    formula     the same by `docs/algorithms.md`, headers of messages included
    off         the largest deviation over ranks, of every rank from its own formula; the bar is 1%
    predicted   the alpha-beta model: alpha and beta once from a ping-pong of the first two ranks, codec rates from one
                encode and one decode on one core, shared by the ranks that it serves; nothing is fitted to a reduction
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
from reductions_rank import DENSE, Task, run_rank

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
BYTES_BAR, TIME_BAR, SRA_BAR = 0.01, 0.25, 0.145


def launch(task: Task, count: int, link: str) -> list[dict[str, Any]]:
    """Run a task on hosts of its own; what each rank found."""
    # A packet that the sender's own queue drops is not on its interface's counter: let none be dropped.
    deep = dataclasses.replace(hosts.LINKS[link], queue="2s")
    return hosts.run_task(hosts.Hosts(count, deep), __file__, task, timeout_seconds=1200)


def fit(ping: list[list[float]]) -> tuple[float, float]:
    """alpha and beta of t(n) = alpha + beta n, by least squares of relative errors."""
    sizes, seconds = np.array(ping).T
    columns = np.stack([np.ones_like(sizes), sizes], axis=1) / seconds[:, None]
    (alpha, beta), *_ = np.linalg.lstsq(columns, np.ones_like(sizes), rcond=None)
    return float(alpha), float(beta)


def evaluate(found: list[dict[str, Any]], task: Task, alpha: float, beta: float) -> list[dict[str, Any]]:
    """One row per reduction, and Gloo's."""
    from gradcomp.core.scheme import parse
    from gradcomp.core.topology import Topology
    from gradcomp.reduce.costs import cost, predict
    from gradcomp.reduce.header import ByteHeader
    from gradcomp.reduce.model import Load, Network

    world = len(found)
    cores = len(os.sched_getaffinity(0))
    codec = found[0]["codec"]
    share = min(1.0, cores / world)  # of a core, that a rank has
    network = Network(alpha, beta, 4 * codec["encode"] * share, 4 * codec["decode"] * share)
    load = Load(codec["payload_bytes"], 4 * task.elements, ByteHeader.size(1))
    topology = Topology(tuple(range(world)))
    rows = []
    gloo = median_seconds(found, DENSE) if task.dense else None
    for name in [*task.reductions, *([DENSE] if task.dense else [])]:
        measured = np.array([statistics.median(rank["rows"][name]["bytes"]) for rank in found])
        seconds = median_seconds(found, name)
        row: dict[str, Any] = {
            "reduction": name,
            "ranks": world,
            "bytes": measured.tolist(),
            "seconds": seconds,
        }
        if name != DENSE:
            one = cost(parse(name), load, topology)
            formula = one.bytes_sent()
            row |= {
                "rounds": one.rounds,
                "encodes": one.encodes,
                "formula": formula.tolist(),
                "counted": [rank["sent"][name] for rank in found],
                "off": float(np.abs(measured - formula).max() / formula.max()),
                "predicted": predict(parse(name), load, topology, network),
                "same_bits": len({rank["digests"][name] for rank in found}) == 1,
            }
            row["time_off"] = seconds / row["predicted"] - 1
        row["ratio"] = seconds / gloo if gloo else None
        rows.append(row)
    return rows


def median_seconds(found: list[dict[str, Any]], name: str) -> float:
    """The median over blocks of the slowest rank's time."""
    return statistics.median(
        max(times) for times in zip(*(rank["rows"][name]["seconds"] for rank in found), strict=True)
    )


def show(rows: list[dict[str, Any]]) -> str:
    headers = [
        "ranks, reduction",
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
    time_off = [f"{label(r)} {100 * r['time_off']:+.1f}%" for r in modelled if abs(r["time_off"]) > TIME_BAR]
    slow = [
        f"{r['ratio']:.3f}" for r in modelled if label(r) == "4: sra" and r["ratio"] and r["ratio"] > SRA_BAR
    ]
    verdicts = [
        ("bytes within 1% of the formula", bytes_off),
        ("time within 25% of the prediction", time_off),
        ("the same bits on all ranks", [label(r) for r in modelled if not r["same_bits"]]),
        (f"sra on 4 ranks at most {SRA_BAR} x gloo", slow),
    ]
    lines = [f"bar: {what}: {'NOT met by ' + ', '.join(by) if by else 'met'}" for what, by in verdicts]
    return lines, not any(by for _, by in verdicts)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hosts", default="2,4,8", help="numbers of hosts (default: 2,4,8)")
    parser.add_argument("--link", choices=hosts.LINKS, default="100mbit")
    parser.add_argument("--reductions", default=",".join(NAMES))
    parser.add_argument("--elements", type=int, default=4 << 20, help="of the gradient (default: 4 Mi)")
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--blocks", type=int, default=3)
    parser.add_argument("--no-gloo", action="store_true", help="leave Gloo's float32 allreduce out")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--task", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.task:
        run_rank(Task.from_json(options.task), options.out)
        return 0
    hosts.exit_on_termination()
    found_machine = report.machine()
    print(report.describe(found_machine))
    chosen = tuple(options.reductions.split(","))
    task = Task(chosen, options.elements, options.bits, options.blocks, not options.no_gloo)
    rows: list[dict[str, Any]] = []
    networks = []
    try:
        for count in map(int, options.hosts.split(",")):
            names = tuple(n for n in task.reductions if not (n.endswith("servers=2") and count == 2))
            one = dataclasses.replace(task, reductions=names)
            found = launch(one, count, options.link)
            alpha, beta = fit(found[0]["ping"])
            measured = {key: found[0][key] for key in ("codec", "link")}
            networks.append({"ranks": count, "alpha": alpha, "beta": beta, **measured})
            rows += evaluate(found, one, alpha, beta)
            print(
                f"{count} hosts, {options.link}: alpha {1e3 * alpha:.3f} ms, beta {8e-6 / beta:.1f} Mbit/s, codec "
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
