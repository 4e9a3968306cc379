"""Local steps on slow links: held-out losses, bytes, and the wall time to a target loss.

    python benchmarks/local_steps.py --train --data wikitext2.txt --json losses.json --resume
    python benchmarks/local_steps.py --times 50mbit --json times.json
    python benchmarks/local_steps.py --show losses.json times.json [more times]

A GPT of 4 blocks on byte pairs (270,000 parameters, AdamW, cosine, norms clipped to 1), 8 sequences of 64 a rank, 4
hosts of network namespaces, one rank each. All rows see the same batches and take as many steps.

--train: over links that nothing limits, since losses do not depend on them. --times: rounds of all rows in turns, on
one link; the first block warms up. --show: both together: the step at which a row's curve first reaches the target,
which is the loss of ddp-fp16 at its end plus --slack percent, times the row's seconds a step.

Columns
    worse %      than ddp-fp16 of the same seed, at the end: the mean over seeds, and its standard error
    payload      of one pseudo-gradient: its float32 bytes divided by those that are sent to one rank
    bytes        what a rank sends for a token that it trains on
    round ms     a row's steps between two exchanges, by the slowest rank; every-step rows have one step
    exposed      the part of it that its steps alone do not take
    delay        the steps that hide the exchange: its seconds divided by those of a step, rounded up
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import hosts
import report
from local_steps_rank import ROWS, Size, Timing, Training, row_of, run_rank
from options import positive

BASELINE = "ddp-fp16"
HOSTS = 4
TRAINED = "ddp-fp16,every-topk1,diloco-15,diloco-30,sparseloco-15-outer2,sparseloco-30-outer2"
TIMED = f"alone,{TRAINED},every-4bit,sparseloco-15-delay1,sparseloco-30-delay1"

Run = dict[str, Any]


def sent_per_step(run: Run) -> float:
    """Bytes that a rank sends in a step; those of DistributedDataParallel by the formula of a ring of float16."""
    if run["row"] == BASELINE:
        return 2 * (HOSTS - 1) / HOSTS * 2 * run["parameters"]
    return float(run["bytes_per_step"])


def payload_ratio(run: Run) -> float | None:
    """A pseudo-gradient's float32 bytes over those that a rank sends each other one; of sums, of which it sends all."""
    row = row_of(run["row"])
    if row.method is None:
        return None
    sent = run["bytes_per_step"] * row.every
    to_one = sent / (HOSTS - 1) if row.method == "sparseloco" else sent / (2 * (HOSTS - 1) / HOSTS)
    return 4 * run["parameters"] / to_one


def losses(runs: Sequence[Run]) -> str:
    by_row = report.by_row(sorted(runs, key=lambda run: run["seed"]))
    base = by_row.get(BASELINE, {})
    lines: list[list[object]] = []
    for name, found in by_row.items():
        worse = [100 * (run["loss"] / base[seed]["loss"] - 1) for seed, run in found.items() if seed in base]
        first = next(iter(found.values()))
        ratio = payload_ratio(first)
        lines.append(
            [
                name,
                ", ".join(f"{run['loss']:.4f}" for run in found.values()),
                _mean_and_error(worse),
                None if ratio is None else f"{ratio:.0f}",
                f"{statistics.mean(map(sent_per_step, found.values())) / first['tokens']:,.1f}",
            ]
        )
    return report.table(["row", "loss by seed", "worse %", "payload", "bytes"], lines)


def _mean_and_error(values: Sequence[float]) -> str | None:
    if not values:
        return None
    error = f" ± {statistics.stdev(values) / math.sqrt(len(values)):.2f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):+.2f}{error}"


def seconds_of(times: Mapping[str, Any]) -> dict[str, float]:
    """By row, the median over blocks of the slowest rank's seconds a step."""
    return {name: statistics.median(each) for name, each in times["seconds"].items()}


def times_table(times: Mapping[str, Any]) -> str:
    step = seconds_of(times)
    alone = step.get("alone")
    lines: list[list[object]] = []
    for name, each in step.items():
        row = row_of(name)
        exposed = None if alone is None else max(each - alone, 0.0)
        dense = row.method in ("average", "diloco") and exposed is not None and alone is not None
        lines.append(
            [
                name,
                f"{1e3 * each * row.every:.0f}",
                f"{1e3 * each:.1f}",
                None if exposed is None else f"{100 * exposed / each:.1f}%",
                math.ceil(exposed * row.every / alone) if dense and exposed is not None and alone else None,
                f"{statistics.median(times['sent'][name]) / times['tokens']:,.1f}",
            ]
        )
    return report.table(["row", "round ms", "step ms", "exposed", "delay", "interface bytes"], lines)


def steps_to(curve: Sequence[Sequence[float]], target: float) -> float | None:
    """The step at which a curve reaches the target, between two of its points; None if it does not."""
    before: Sequence[float] | None = None
    for step, loss in curve:
        if loss <= target:
            if before is None or before[1] <= loss:
                return step
            return before[0] + (step - before[0]) * (before[1] - target) / (before[1] - loss)
        before = (step, loss)
    return None


def wall_table(runs: Sequence[Run], times: Sequence[Mapping[str, Any]], slack: float) -> str:
    by_row = report.by_row(runs)
    targets = {seed: run["curve"][-1][1] * (1 + slack / 100) for seed, run in by_row[BASELINE].items()}
    head, lines = ["row", "steps"], []
    for one in times:
        head += [f"{one['link']['name']}: s", "x ddp-fp16"]
    for name, found in by_row.items():
        reached = [steps_to(run["curve"], targets[seed]) for seed, run in found.items() if seed in targets]
        line: list[object] = [name]
        if not reached or None in reached:
            lines.append([name, f"{sum(r is not None for r in reached)} of {len(reached)} reach it"])
            lines[-1] += [None] * (2 * len(times))
            continue
        steps = statistics.mean(r for r in reached if r is not None)
        line.append(f"{steps:.0f}")
        for one in times:
            seconds = seconds_of(one)
            if name not in seconds:
                line += [None, None]
                continue
            base = statistics.mean(
                steps_to(run["curve"], targets[seed]) or run["curve"][-1][0]
                for seed, run in by_row[BASELINE].items()
            )
            line += [
                f"{steps * seconds[name]:.0f}",
                f"{steps * seconds[name] / (base * seconds[BASELINE]):.3f}",
            ]
        lines.append(line)
    return report.table(head, lines)


def train(options: argparse.Namespace) -> None:
    machine = report.machine()
    print(report.describe(machine))
    size = Size(options.width, options.sequences)
    about = {
        "benchmark": "local_steps",
        "ranks": HOSTS,
        **{name: getattr(options, name) for name in ("width", "sequences", "steps", "warmup")},
    }
    runs: list[Run] = report.kept(options.json, about) if options.resume else []
    for seed, name in itertools.product(range(options.seeds), options.rows.split(",")):
        if any(run["row"] == name and run["seed"] == seed for run in runs):
            continue
        data = options.data and str(options.data)
        task = Training(name, size, options.steps, options.warmup, seed, data, options.eval_every)
        found = hosts.run_task(hosts.Hosts(HOSTS), __file__, task)[0]
        runs.append({"row": name, "seed": seed, **found})
        print(f"seed {seed}, {name}: {found['loss']:.4f}", flush=True)
        report.write_json(options.json, {**about, "machine": machine, "runs": runs})
    print(losses(runs))


def time_link(options: argparse.Namespace) -> None:
    machine = report.machine()
    print(report.describe(machine))
    names = tuple(options.rows.split(","))
    data = options.data and str(options.data)
    size = Size(options.width, options.sequences)
    task = Timing(names, size, options.blocks, options.round_steps, data)
    found = hosts.run_task(hosts.Hosts(HOSTS, options.times), __file__, task)
    link = {"name": options.times, **found[0]["link"]}
    print(f"{HOSTS} hosts, {link['bytes_per_second'] * 8e-6:.1f} Mbit/s measured; {options.blocks} blocks")
    times = {
        "benchmark": "local_steps times",
        "machine": machine,
        "link": link,
        "width": options.width,
        "sequences": options.sequences,
        "tokens": found[0]["tokens"],
        **{
            key: {
                name: [max(each) for each in zip(*(r[key][name] for r in found), strict=True)]
                for name in names
            }
            for key in ("seconds", "sent")
        },
    }
    print(times_table(times))
    report.write_json(options.json, times)


def show(options: argparse.Namespace) -> None:
    runs, *times = (json.loads(path.read_text(encoding="utf-8")) for path in options.show)
    print(losses(runs["runs"]))
    for one in times:
        print(f"\n{one['link']['name']}, {one['link']['bytes_per_second'] * 8e-6:.1f} Mbit/s measured\n")
        print(times_table(one))
    if times:
        print(f"\nseconds to the loss of {BASELINE} plus {options.slack}%\n")
        print(wall_table(runs["runs"], times, options.slack))


def task_of(text: str) -> Training | Timing:
    given = json.loads(text)
    given["size"] = Size(**given["size"])
    return Training(**given) if "row" in given else Timing(**{**given, "rows": tuple(given["rows"])})


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--train", action="store_true", help="train rows over seeds")
    parser.add_argument("--times", choices=hosts.LINKS, help="time rounds on such links")
    parser.add_argument("--show", type=Path, nargs="+", help="JSON of --train, then of --times")
    parser.add_argument("--rows", help=f"of {', '.join(ROWS)}; @2e-3 sets the learning rate")
    parser.add_argument("--seeds", type=positive, default=3)
    parser.add_argument("--steps", type=positive, default=4500)
    parser.add_argument("--warmup", type=positive, default=100, help="steps in which the learning rate rises")
    parser.add_argument("--width", type=positive, default=64, help="of the GPT (default: 64)")
    parser.add_argument("--sequences", type=positive, default=8, help="of a rank's batch (default: 8)")
    parser.add_argument("--eval-every", type=positive, default=150)
    parser.add_argument("--blocks", type=positive, default=3, help="timed rounds of each row (default: 3)")
    parser.add_argument("--round-steps", type=positive, default=5, help="of rows without rounds (default: 5)")
    parser.add_argument("--slack", type=float, default=1.0, help="percent above the target (default: 1)")
    parser.add_argument("--data", type=Path, help="a text file (default: Python's standard library)")
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--resume", action="store_true", help="keep the runs that the file of --json holds")
    options = hosts.parse(parser, lambda task, out: run_rank(task_of(task), out))
    options.rows = options.rows or (TIMED if options.times else TRAINED)
    if unknown := [name for name in options.rows.split(",") if name.partition("@")[0] not in ROWS]:
        parser.error(f"unknown rows {', '.join(unknown)}; there are {', '.join(ROWS)}")
    if options.resume and options.json is None:
        parser.error("--resume needs --json")
    if not (options.train or options.times or options.show):
        parser.error("one of --train, --times and --show is needed")
    return hosts.exit_code(
        lambda: show(options) if options.show else train(options) if options.train else time_link(options)
    )


if __name__ == "__main__":
    sys.exit(main())
