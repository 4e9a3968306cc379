"""Where the time of a training step goes, and what one more exchange bucket costs. Needs root.

    python benchmarks/step_parts.py                                      # 4 bits, 2 hosts, links of 1 Gbit/s
    python benchmarks/step_parts.py --compression topk:density=0.01 --ranks 4 --link 100mbit --json parts.json

The word LSTM of 10.6 M parameters on hosts made of network namespaces, one core per rank. The same compression is
measured with exchange buckets of several sizes, beside no exchange and DDP, in alternation: A B C A B C. A time is the
median over the steps of the slowest rank; processor times, phases and wake-ups are means over the steps of rank 0.

First table, by elements of an exchange bucket
    exposed    step - step without exchange
    main, engine, Gloo, other
               processor time of a step by thread: the training thread with autograd's, gradcomp's, Gloo's, the rest
    wake-ups   of the engine's thread in a step
    calls      of Python functions on the engine's thread, by bucket
    price      of one more bucket than in the row with the fewest: of the step, of the engine's thread beyond codecs,
               and of Gloo's threads

Second table, by phase: its seconds in a step, and its floor
    compress, reduce, decompress
               time inside the kernels and what surrounds them; the floor is the bytes that they read and write at the
               rate at which one core copies memory
    under way  time in which a message was under way; the floor is the bytes on the wire at the link's measured rate
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

import hosts
import report
from options import add_timing
from step_parts_rank import Parts, run_rank
from step_rows import DDP, IDEAL

SLICES = (1 << 17, 1 << 18, 1 << 19, 1 << 20, 1 << 21)
#: Seconds: one more exchange bucket at most, of a step; of the engine's thread beyond codecs.
STEP_BAR, ENGINE_BAR = 0.3e-3, 0.15e-3
#: By thread: the column of a thread is that of the first name it begins with.
THREADS = {
    "engine": ("gradcomp",),
    "Gloo": ("gloo", "pt_gloo"),
    "main": ("MainThread", "pt_autograd", "python"),
}
CODING = ("compress", "reduce", "decompress")


def evaluate(found: list[dict[str, Any]], task: Parts) -> dict[str, dict[str, Any]]:
    """The figures of each row, in seconds of a step."""
    results: dict[str, dict[str, Any]] = {}
    for key, own in found[0]["rows"].items():
        seconds = [statistics.median(rank["rows"][key]["seconds"]) for rank in found]
        steps = len(own["seconds"])
        result: dict[str, Any] = {"step": max(seconds), "threads": dict.fromkeys([*THREADS, "other"], 0.0)}
        result["wakeups"] = 0.0
        for block in own["threads"]:
            for name, (used, wakeups) in block.items():
                column = next((c for c, names in THREADS.items() if name.startswith(names)), "other")
                if name.startswith("gradcomp-"):  # the watchdog and others, which no step waits for
                    column = "other"
                result["threads"][column] += used / steps
                result["wakeups"] += wakeups / steps * (column == "engine")
        totals: dict[str, float] = {}
        for block in own["phases"]:
            for name, spent in block.items():
                totals[name] = totals.get(name, 0.0) + spent / steps
        result |= {"phases": totals} | {n: own[n] for n in ("buckets", "wire_bytes", "calls") if n in own}
        results[key] = result
    ideal = results[IDEAL]["step"]
    for result in results.values():
        result["exposed"] = result["step"] - ideal
    coarse = min((results[str(n)] for n in task.slices), key=lambda each: each["buckets"])
    for n in task.slices:
        result = results[str(n)]
        more = result["buckets"] - coarse["buckets"]
        if more:
            beyond = [one["threads"]["engine"] - coding(one) for one in (result, coarse)]
            result["price"] = {
                "step": (result["step"] - coarse["step"]) / more,
                "engine": (beyond[0] - beyond[1]) / more,
                "Gloo": (result["threads"]["Gloo"] - coarse["threads"]["Gloo"]) / more,
            }
    return results


def coding(result: dict[str, Any]) -> float:
    return sum(result["phases"].get(name, 0.0) for name in CODING)


def floors(found: dict[str, Any], result: dict[str, Any], world: int) -> dict[str, float]:
    """The least seconds of each phase: gradients are read, codes are written, and means are written once."""
    dense, wire = 4 * found["parameters"], result["wire_bytes"]
    payload = wire * world / (2 * (world - 1)) if world > 1 else 0.0  # sra sends 2 (N-1)/N of it
    rate = found["copy_bytes_per_second"]
    return {
        "compress": (dense + payload) / rate,
        "reduce": (payload + payload / world) / rate,
        "decompress": (payload + dense) / rate,
        "under way": wire / found["link"]["bytes_per_second"],
    }


def show(results: dict[str, dict[str, Any]]) -> str:
    headers = ["elements of a bucket", "buckets", "step ms", "x DDP", "exposed ms", *THREADS, "other"]
    headers += ["wake-ups", "calls", "price: step", "engine", "Gloo"]
    lines = []
    for key, result in results.items():
        price = result.get("price", {})
        lines.append(
            [
                {IDEAL: "no exchange", DDP: "DDP"}.get(key, key),
                result.get("buckets"),
                milliseconds(result["step"]),
                f"{result['step'] / results[DDP]['step']:.3f}",
                milliseconds(result["exposed"]),
                *(milliseconds(each) for each in result["threads"].values()),
                f"{result['wakeups']:.0f}" if "calls" in result else None,
                f"{result['calls']:.0f}" if "calls" in result else None,
                *(f"{1e3 * price[name]:.2f}" if price else None for name in ("step", "engine", "Gloo")),
            ]
        )
    return report.table(headers, lines)


def show_phases(found: dict[str, Any], results: dict[str, dict[str, Any]], task: Parts, world: int) -> str:
    lines = []
    for n in task.slices:
        least = floors(found, results[str(n)], world)
        phases = results[str(n)]["phases"]
        cells = [f"{1e3 * phases.get(name, 0.0):.1f} ({1e3 * floor:.1f})" for name, floor in least.items()]
        lines.append([n, *cells])
    return report.table(["elements of a bucket", *(f"{name} (floor) ms" for name in least)], lines)


def milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}"


def bars(results: dict[str, dict[str, Any]], task: Parts) -> list[str]:
    """Verdicts on the price of a bucket, by the smallest buckets."""
    price = results[str(min(task.slices))].get("price")
    if price is None:
        return []
    return [
        f"bar: {what}: {1e3 * price[name]:.2f} ms, at most {1e3 * most}: {'met' if price[name] <= most else 'MISSED'}"
        for what, name, most in (
            ("one more bucket, of a step", "step", STEP_BAR),
            ("one more bucket, of the engine's thread beyond codecs", "engine", ENGINE_BAR),
        )
    ]


def measure(options: argparse.Namespace) -> int:
    task = Parts(options.compression, tuple(int(n) for n in options.slices.split(",")), options.blocks, options.steps,
                 options.warmup, 0, options.data and str(options.data.resolve()))  # fmt: skip
    machine = report.machine()
    print(report.describe(machine))
    found = hosts.run_task(hosts.Hosts(options.ranks, options.link), __file__, task)
    link = found[0]["link"]["bytes_per_second"]
    results = evaluate(found, task)
    print(
        f"{options.ranks} hosts, {options.link} links: {8e-6 * link:.0f} Mbit/s measured; one core copies "
        f"{1e-9 * found[0]['copy_bytes_per_second']:.1f} GB/s; {task.compression}; "
        f"{found[0]['parameters']:,} parameters, batch {found[0]['batch'][0]} x {found[0]['batch'][1]}; "
        f"{task.blocks} blocks of {task.steps} steps"
    )
    print(show(results))
    print(show_phases(found[0], results, task, options.ranks))
    print("\n".join(bars(results, task)))
    report.write_json(
        options.json,
        {"benchmark": "step_parts", "machine": machine, "link": options.link, "ranks": options.ranks}
        | {"found": {k: v for k, v in found[0].items() if k != "rows"}, "rows": results},
    )
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--compression", default="quantize:bits=4")
    parser.add_argument("--slices", default=",".join(map(str, SLICES)), help="elements of an exchange bucket")
    parser.add_argument("--link", choices=hosts.LINKS, default="1gbit")
    parser.add_argument("--data", type=Path, help="a text file (default: that of Python's standard library)")
    add_timing(parser, blocks=4, steps=8)
    parser.add_argument("--json", type=Path)
    options = hosts.parse(parser, lambda task, out: run_rank(Parts.from_json(task), out))
    return hosts.exit_code(lambda: measure(options))


if __name__ == "__main__":
    sys.exit(main())
