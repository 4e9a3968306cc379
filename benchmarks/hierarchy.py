"""Several ranks on each host: what crosses the link, flat and hierarchical. Hosts are network namespaces; needs root.

    python benchmarks/hierarchy.py                                # 2 hosts of 2 ranks, 1 Gbit/s
    python benchmarks/hierarchy.py --hosts 3 --link 100mbit --blocks 8 --json hierarchy.json

A gradient of float32, at 4 bits in buckets of 1 Mi elements, is exchanged by scatter-reduce-allgather over all ranks
and by the hierarchical reduction (float32 inside a host, 4 bits between the leaders), over Gloo alone and over Gloo
with shared memory inside the hosts. Times are medians over blocks of the slowest rank's; bytes are the most that a
host's interface has sent in an exchange, headers of packets included, in the median. The ratios are to the flat form
over the same transport: bars are 0.55 for bytes and 1 for time.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

import hosts
import report
from reductions_rank import Row, Task, run_rank

FLAT, HIERARCHICAL = REDUCTIONS = ("sra", "hierarchical")
TRANSPORTS = ("torch", "shm+torch")
BYTES_BAR, TIME_BAR = 0.55, 1.0


def launch(task: Task, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run a task on hosts of its own; what each rank found."""
    made = hosts.Hosts(options.hosts, options.link, options.ranks_per_host)
    return hosts.run_task(made, __file__, task, timeout_seconds=600)


def evaluate(found: list[dict[str, Any]], transport: str) -> list[dict[str, Any]]:
    rows = []
    for name in found[0]["rows"]:
        times = zip(*(rank["rows"][name]["seconds"] for rank in found), strict=True)
        rows.append(
            {
                "transport": transport,
                "reduction": name.partition(",")[0],
                "seconds": statistics.median(max(each) for each in times),
                "link_bytes": max(statistics.median(rank["rows"][name]["bytes"]) for rank in found),
                "same_bits": len({rank["digests"][name] for rank in found}) == 1,
            }
        )
    flat, hierarchical = rows
    for key in ("seconds", "link_bytes"):
        hierarchical[f"{key}_ratio"] = hierarchical[key] / flat[key]
    return rows


def show(rows: list[dict[str, Any]]) -> str:
    headers = ["transport, reduction", "ms", "x flat", "bytes on the link", "x flat"]
    cells = [
        [
            f"{row['transport']}: {row['reduction']}",
            f"{1e3 * row['seconds']:.1f}",
            f"{row['seconds_ratio']:.3f}" if "seconds_ratio" in row else None,
            f"{row['link_bytes']:,.0f}",
            f"{row['link_bytes_ratio']:.3f}" if "link_bytes_ratio" in row else None,
        ]
        for row in rows
    ]
    return report.table(headers, cells)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks-per-host", type=int, default=2)
    parser.add_argument("--link", choices=hosts.LINKS, default="1gbit")
    parser.add_argument("--elements", type=int, default=4 << 20, help="of the gradient (default: 4 Mi)")
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--slice-elements", type=int, default=1 << 20, help="of a bucket (default: 1 Mi)")
    parser.add_argument("--blocks", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = hosts.parse(parser, lambda task, out: run_rank(Task.from_json(task), out))
    hosts.exit_on_termination()
    found_machine = report.machine()
    print(report.describe(found_machine))
    rows: list[dict[str, Any]] = []
    try:
        for transport in TRANSPORTS:
            task = Task(
                tuple(Row(name, options.slice_elements) for name in REDUCTIONS),
                options.elements,
                options.bits,
                options.blocks,
                False,
                transport,
            )
            rows += evaluate(launch(task, options), transport)
    except hosts.HostsError as error:
        print(error, file=sys.stderr)
        return 2
    print(show(rows))
    compared = [row for row in rows if row["reduction"] == HIERARCHICAL]
    met = all(row["same_bits"] for row in rows)
    for what, key, bar in (
        ("bytes on the link", "link_bytes_ratio", BYTES_BAR),
        ("time", "seconds_ratio", TIME_BAR),
    ):
        values = ", ".join(f"{row[key]:.3f} over {row['transport']}" for row in compared)
        fine = all(row[key] <= bar for row in compared)
        met = met and fine
        print(f"bar: {what} at most {bar} x flat: {'met' if fine else 'NOT met'} ({values})")
    report.write_json(options.json, {"benchmark": "hierarchy", "machine": found_machine, "rows": rows})
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
