"""Time, bytes and peak memory of a training step of a GPT that fully_shard has sharded. Needs root.

    python benchmarks/sharded.py                                 # two hosts, links of 1 Gbit/s
    python benchmarks/sharded.py --link unshaped --rows null,plain,w8g8
    python benchmarks/sharded.py --ranks 4 --json sharded.json
    python benchmarks/sharded.py --ranks-per-host 2 --rows null,plain,w8g8-flat,w8g8,w8g8-levels
    python benchmarks/sharded.py --hybrid                        # two ranks a host, replicas on the hosts

6 blocks of width 256, a vocabulary of 8,000, sequences of 32: about 9 million parameters. A block is a unit.
One rank per host unless --ranks-per-host says more, one thread and one core per rank while there are as many cores. All
rows live in the same processes, each with its own copy of the same model, and alternate in blocks of steps. A figure is
the median over all steps of a row but the first of each block, for the slowest rank.

Columns
    x plain    median step over that of fully_shard alone
    roofline   step without exchange (row ``null``: collectives that copy a rank's own shards) + formula bytes at the
               link's measured rate + the codec's time alone, measured in the same process
    exchange   what gradcomp counts itself: time in its collectives, for which the program waits
    formula    bytes that a host sends to the others in a step: of each message s b / 8 + 8 per quantisation bucket
               for a shard of s elements, and 4 bytes an element of what travels exactly. A rank sends its shard to each
               rank of other hosts, or in two levels to one of each host. What plain sends among several ranks of a host
               depends on Gloo
    beside     what gradcomp adds to that: headers, which are also a formula. The first steps have comparisons, too
    interface  what the host's interface sent in a step, without TCP's headers and what was sent again; none where TCP
               sent more than a twentieth again
    peak       with --memory: the most memory of a rank beyond what it had before the model was made
    ranks      whether all ranks decoded the same weights in the last step, bit for bit

Columns of --hybrid: a model is sharded inside each host, uncompressed, and hosts are replicas
    exposed    median step less that of the same row whose mean over replicas is a copy of a replica's own gradients
    x hsdp     that over the exposed time of torch's own hybrid sharding
    floor      the step with a copy + formula bytes of a host at the link's rate + the codec's time alone, of the ranks
               that share a core one after the other
    formula    bytes that a host sends to the other: 2 (R-1)/R of the payload of its shards, for R replicas
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

import hosts
import report
from options import add_timing, positive
from sharded_rank import ROWS, Task, run_rank

HYBRID = {"hsdp-copy": None, "hsdp": "hsdp-copy", "hybrid-copy": None, "hybrid-none": "hybrid-copy"}
HYBRID |= {"hybrid-4bit": "hybrid-copy", "hybrid-4bit-128": "hybrid-copy"}
TIMED = ("null", "plain", "plain-g16", "w8g8", "w4g4", "w8g8-codes", "w8g8-gather")


def evaluate(
    found: list[dict[str, Any]], link: dict[str, float], names: list[str], per_host: int
) -> dict[str, dict[str, Any]]:
    """By row, what the tables show."""
    results: dict[str, dict[str, Any]] = {}
    for name in names:
        ranks = [each["rows"][name] for each in found]
        steps = [max(times) for times in zip(*(r["seconds"] for r in ranks), strict=True)]
        one: dict[str, Any] = {
            "seconds": statistics.median(steps),
            "interface": max(
                (r["interface_bytes"] for r in ranks if r["interface_bytes"] is not None), default=None
            ),
            "formula": most_of_a_host(ranks, "formula_bytes", per_host),
            "beside": most_of_a_host(ranks, "beside_bytes", per_host),
            "host_formula": max(
                sum(r["formula_bytes"] for r in ranks[at : at + per_host])
                for at in range(0, len(ranks), per_host)
            ),
            "exchange_seconds": max(r["exchange_seconds"] for r in ranks),
            "codec_seconds": max(r["codec_seconds"] for r in ranks),
            "loss": statistics.mean(ranks[0]["losses"][-5:]),
            "same": len({r["digest"] for r in ranks}) == 1,
        }
        results[name] = one
    for one in results.values():
        if "plain" in results:
            one["times_plain"] = one["seconds"] / results["plain"]["seconds"]
        if "null" in results:
            wire = one["formula"] / link["bytes_per_second"]
            one["roofline"] = results["null"]["seconds"] + wire + one["codec_seconds"]
            one["times_roofline"] = one["seconds"] / one["roofline"]
    return results


def most_of_a_host(ranks: list[dict[str, Any]], name: str, per_host: int) -> int:
    """The largest sum over the ranks of a host."""
    return max(sum(rank[name] for rank in ranks[at : at + per_host]) for at in range(0, len(ranks), per_host))


def show(results: dict[str, dict[str, Any]]) -> str:
    """The table."""
    head = ["row", "step ms", "x plain", "roofline ms", "x roofline", "exchange ms", "codec ms"]
    head += ["formula", "beside", "interface", "peak MB", "ranks", "loss"]

    def ratio(value: float | None) -> str | None:
        return None if value is None else f"{value:.3f}"

    lines = [
        [
            name,
            f"{one['seconds'] * 1e3:.1f}",
            ratio(one.get("times_plain")),
            f"{one['roofline'] * 1e3:.1f}" if "roofline" in one else None,
            ratio(one.get("times_roofline")),
            f"{one['exchange_seconds'] * 1e3:.1f}",
            f"{one['codec_seconds'] * 1e3:.1f}",
            f"{one['formula']:,.0f}",
            f"{one['beside']:,.0f}",
            None if one["interface"] is None else f"{one['interface']:,.0f}",
            f"{one['peak_bytes'] / 1e6:.0f}" if "peak_bytes" in one else None,
            "same" if one["same"] else "DIFFER",
            f"{one['loss']:.3f}",
        ]
        for name, one in results.items()
    ]
    return report.table(head, lines)


def show_hybrid(results: dict[str, dict[str, Any]], link: dict[str, float], ranks: int) -> str:
    """The table of hybrid sharding; it adds its columns to the results."""
    share = max(1.0, ranks / len(os.sched_getaffinity(0)))
    for name, one in results.items():
        if (copy := results.get(HYBRID[name] or "")) is not None:
            wire = one["host_formula"] / link["bytes_per_second"]
            one["exposed"] = one["seconds"] - copy["seconds"]
            one["floor"] = copy["seconds"] + wire + share * one["codec_seconds"]
    plain = results.get("hsdp", {}).get("exposed")
    head = [
        "row",
        "step ms",
        "exposed ms",
        "x hsdp",
        "floor ms",
        "x floor",
        "waited ms",
        "formula",
        "interface",
    ]
    lines = []
    for name, one in results.items():
        exposed, floor = one.get("exposed"), one.get("floor")
        one["times_hsdp"] = exposed / plain if exposed is not None and plain else None
        lines.append(
            [
                name,
                f"{one['seconds'] * 1e3:.1f}",
                None if exposed is None else f"{exposed * 1e3:.1f}",
                None if one["times_hsdp"] is None else f"{one['times_hsdp']:.3f}",
                None if floor is None else f"{floor * 1e3:.1f}",
                None if floor is None else f"{one['seconds'] / floor:.3f}",
                f"{one['exchange_seconds'] * 1e3:.1f}",
                f"{one['host_formula']:,.0f}",
                None if one["interface"] is None else f"{one['interface']:,.0f}",
                "same" if one["same"] else "DIFFER",
                f"{one['loss']:.3f}",
            ]
        )
    return report.table([*head, "ranks", "loss"], lines)


def measure(options: argparse.Namespace) -> int:
    names = (options.rows or ",".join(HYBRID if options.hybrid else TIMED)).split(",")
    there = [name for name in ROWS if (name in HYBRID) == options.hybrid]
    if unknown := [name for name in names if name not in there]:
        print(f"unknown rows {', '.join(unknown)}; there are {', '.join(there)}", file=sys.stderr)
        return 2
    task = Task(tuple(names), options.blocks, options.steps, options.warmup, options.seed)
    machine = report.machine()
    print(report.describe(machine))
    per_host = 2 if options.hybrid else options.ranks_per_host
    found = hosts.run_task(hosts.Hosts(options.ranks, options.link, per_host), __file__, task)
    link = found[0]["link"]
    print(
        f"{options.ranks} hosts of {per_host} ranks, {options.link} links: "
        f"{link['bytes_per_second'] * 8e-6:.0f} Mbit/s measured; "
        f"{found[0]['parameters']:,} parameters; {task.blocks} blocks of {task.steps} steps after {task.warmup}"
    )
    results = evaluate(found, link, names, per_host)
    if options.memory:
        for name in names:  # in processes of its own
            alone = dataclasses.replace(task, rows=(name,), blocks=1)
            ranks = hosts.run_task(hosts.Hosts(options.ranks, "unshaped", per_host), __file__, alone)
            results[name]["peak_bytes"] = max(rank["peak_bytes"] for rank in ranks)
    print(show_hybrid(results, link, options.ranks * per_host) if options.hybrid else show(results))
    report.write_json(
        options.json,
        {
            "benchmark": "sharded",
            "machine": machine,
            "link": {"name": options.link, **link},
            "ranks": options.ranks,
            "ranks_per_host": per_host,
            "task": dataclasses.asdict(task),
            "rows": results,
        },
    )
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", help=f"of {', '.join(ROWS)}")
    parser.add_argument(
        "--hybrid", action="store_true", help="two ranks a host: sharded in hosts, replicas of hosts"
    )
    parser.add_argument("--link", choices=hosts.LINKS, default="1gbit")
    add_timing(parser, blocks=4, steps=6)
    parser.add_argument("--ranks-per-host", type=positive, default=1, help="of each host (default: 1)")
    parser.add_argument(
        "--memory", action="store_true", help="measure peak memory, each row in a run of its own"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = hosts.parse(parser, lambda task, out: run_rank(Task(**json.loads(task)), out))
    return hosts.exit_code(lambda: measure(options))


if __name__ == "__main__":
    sys.exit(main())
