"""Controllers against uniform levels: bytes, final metric and overhead over paired seeds; 2 ranks.

    python benchmarks/adaptive.py --cifar cifar10_10k.npz                  # ResNet-20, the word LSTM and a GPT, 3 seeds
    python benchmarks/adaptive.py --task lstm --families rank --controllers lgreco,kmeans --seeds 1 --json table.json
    python benchmarks/adaptive.py --json table.json --resume               # what table.json lacks
    python benchmarks/adaptive.py --task lstm --families rank --controllers sweep --link 1gbit    # several references

The tasks are those of convergence.py, and a GPT of 12 blocks (2.9 M parameters, AdamW) on the LSTM's text. References
are the papers': 4 bits; TopK 1% and rank 4 on the ResNet, TopK 10% and rank 32 on language models. Controllers decide
once an epoch of the ResNet, and every 100 steps of the others, or as --every-steps says. lgreco has tables from single
steps, lgreco-adam counts their errors as suits Adam, rows that end with blocks divide layers into 32 blocks of rows,
lgreco-window has tables from gradients added up over the period, as the paper has it; rows that end with bf16 send
excluded layers in bfloat16, and uniform-zeros sends TopK's zeros. adacomp, threshold, threshold-tuned and global-topk
choose densities of their own, without a controller.

Columns
    bytes       what a rank sends per step, headers and votes included, in the mean over the whole run
    fewer       bytes of uniform over those of the row: tables 2 to 4 of Markov et al. 2024, 3.8 of Markov 2024;
                (second half) the same over the second half of the steps
    compressible  bytes per step of the layers that are not excluded, by formula, without headers; (fewer) by these
    worse by    than uniform, relative, per pair; then the mean. The bar is 1%
    overhead    processor time of error tables and program over training time, the larger of the ranks'; the bar is 1%.
    adding      the same of adding gradients up, which the papers do not count; window= makes it less
    plans       changes of plan in the run, of the first seed
    step ms     median over the second half, of rank 0; other jobs on the machine change it
    density     values sent over elements of the layers that are not excluded, in the mean over the run
    factors     GraVAC: share of the steps that sent each factor, 1 being dense, in the mean over seeds; "floats" is the
                paper's volume, without indices. GraVAC is compared with uncompressed training; --controllers
                gravac-energy has its printed gain, gravac-released that of the authors' code; gravac-random-0.7 is one
                row, and gravac-fixed-topk-10 one whose factor stays
    to loss     steps until rank 0's training loss, over a tenth of the run, is what uncompressed training of the seed
                has after 80% of the steps, in percent of the run, by seed; then in how many times fewer bytes than that
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import convergence
import hosts
import report
from adaptive_rows import (
    DEFAULT,
    DENSE,
    DENSITIES,
    FAMILIES,
    RESNET,
    SWEEP,
    TASKS,
    UNIFORM,
    Arm,
    arms,
    gravac_arms,
)
from convergence_rows import METRICS
from convergence_tasks import Settings
from options import add_training, check_training

Run = dict[str, Any]

BAR = 0.01
#: The share of the steps after which uncompressed training has the loss that others are to reach.
REACHED = 0.8


def collect(task: str, arm: Arm, found: Sequence[dict[str, Any]]) -> list[Run]:
    """The runs of a row, all ranks together."""
    runs = []
    for ranks in convergence.by_seed(found, f"{task}, {arm.title}"):
        spent = [run.get("spent_seconds", {}) for run in ranks]
        runs.append(
            {
                "task": task,
                "row": arm.key,
                "compression": arm.compression,
                "controller": arm.controller,
                **ranks[0],
                "spent_by_rank": spent,
                "overhead": _share(spent, ranks, "measure", "decide"),
                "adding": _share(spent, ranks, "add"),
            }
        )
    return runs


def _share(spent: Sequence[dict[str, float]], ranks: Sequence[Run], *kinds: str) -> float:
    """Seconds of these kinds over training time, of the rank where that is most."""
    shares = (sum(s.get(k, 0.0) for k in kinds) / run["seconds"] for s, run in zip(spent, ranks, strict=True))
    return max(shares)


def measure(options: argparse.Namespace, runs: list[Run]) -> list[Run]:
    """Every run that is asked for and not there yet; written after each row."""
    settings = Settings(
        60, options.lstm_steps, options.resnet_epochs, _path(options.data), _path(options.cifar)
    )
    for task in options.task:
        for arm in arms(
            task, options.families.split(","), options.controllers.split(","), options.every_steps
        ):
            done = {run["seed"] for run in runs if (run["task"], run["row"]) == (task, arm.key)}
            seeds = tuple(seed for seed in range(options.seeds) if seed not in done)
            if not seeds:
                continue
            watch = "density_watch" if arm.family and arm.family.key == "density" else ""
            plan = convergence.Plan(
                task, arm.compression, 1.0, seeds, settings, arm.controller, arm.exact, watch
            )
            found = convergence.launch(plan, options.ranks, options.link)
            if found is None:
                print(f"{task}, {arm.title}: left out, a rank failed; its error is above", file=sys.stderr)
                continue
            new = collect(task, arm, found)
            runs += new
            for run in new:
                print(
                    f"{task}, {arm.title}, seed {run['seed']}: {METRICS[task][0]} {run['metric']:.4f}, "
                    f"{run['run_bytes_per_step']:,.0f} bytes a step, {run['seconds']:.1f} s",
                    file=sys.stderr,
                    flush=True,
                )
            save(options, runs)
    return runs


def _path(path: Path | None) -> str | None:
    return None if path is None else str(path.resolve())


def save(options: argparse.Namespace, runs: list[Run]) -> list[dict[str, Any]]:
    """Write runs and rows, if a path was given; returns the rows."""
    rows = [row for task in TASKS for row in evaluate(task, runs)]
    about = {
        "lstm_steps": options.lstm_steps,
        "resnet_epochs": options.resnet_epochs,
        "link": options.link,
        "every_steps": options.every_steps,
    }
    report.write_json(
        options.json,
        {"benchmark": "adaptive", "machine": report.machine(), "settings": about, "rows": rows, "runs": runs},
    )
    return rows


def evaluate(task: str, runs: Sequence[Run]) -> list[dict[str, Any]]:
    """A row for each arm, compared with its family's uniform level seed by seed."""
    sign = METRICS[task][1]
    by_row = report.by_row(run for run in runs if run["task"] == task)
    every = [*_every_controller(), *(arm.key for arm in gravac_arms(task))]
    known = {arm.key: arm for arm in arms(task, [f.key for f in FAMILIES], every)}
    rows = []
    for key in sorted(by_row, key=list(known).index):
        arm, own = known[key], by_row[key]
        base = by_row.get(f"{arm.family.key}-{UNIFORM}" if arm.family else DENSE, {})
        seeds = sorted(own.keys() & base.keys())
        if not seeds:
            continue
        worse = [sign * (own[s]["metric"] / base[s]["metric"] - 1) for s in seeds]
        fewer = [base[s]["run_bytes_per_step"] / own[s]["run_bytes_per_step"] for s in seeds]
        rows.append(
            {
                "task": task,
                "row": key,
                "title": arm.title,
                "seeds": seeds,
                "metrics": [own[s]["metric"] for s in seeds],
                "worse": worse,
                "mean_worse": statistics.mean(worse),
                "bytes_per_step": statistics.mean(own[s]["run_bytes_per_step"] for s in seeds),
                "dense_ratio": statistics.mean(own[s]["ratio"] for s in seeds),
                "fewer": statistics.mean(fewer),
                "fewer_late": _mean_ratio(base, own, seeds, "bytes_per_step"),
                "compressible": _mean(own, seeds, "compressible_bytes_per_step"),
                "fewer_compressible": _mean_ratio(base, own, seeds, "compressible_bytes_per_step"),
                "target": arm.family.target if arm.family and key.endswith("-lgreco") else None,
                "overhead": max(own[s]["overhead"] for s in seeds),
                "adding": max(own[s]["adding"] for s in seeds),
                "plans": None if "factors" in own[seeds[0]] else len(own[seeds[0]].get("plans", [])),
                "density": _mean(own, seeds, "density"),
                "step_seconds": _mean(own, seeds, "step_seconds"),
                "factors": _factors_of([own[s] for s in seeds]),
                "fewer_floats": _mean(own, seeds, "fewer_floats"),
                "reached": [reached(base[s], own[s]) for s in seeds],
            }
        )
    return rows


def _mean(runs: dict[int, Run], seeds: Sequence[int], key: str) -> float | None:
    """None where a run lacks it: those of before it was written down, and GraVAC's, whose plans are not kept."""
    found = [runs[s].get(key) for s in seeds]
    return None if None in found else statistics.mean(found)


def _mean_ratio(base: dict[int, Run], own: dict[int, Run], seeds: Sequence[int], key: str) -> float | None:
    pairs = [(base[s].get(key), own[s].get(key)) for s in seeds]
    return None if any(not a or not b for a, b in pairs) else statistics.mean(a / b for a, b in pairs)


def _factors_of(runs: Sequence[Run]) -> dict[str, float] | None:
    """The mean number of steps by factor; None for other controllers than GraVAC."""
    if any("factors" not in run for run in runs):
        return None
    factors = sorted({factor for run in runs for factor in run["factors"]}, key=float)
    return {factor: statistics.mean(run["factors"].get(factor, 0) for run in runs) for factor in factors}


def reached(base: Run, own: Run) -> tuple[float, float] | None:
    """The share of the steps until the base's loss of ``REACHED`` is reached, and by how many times fewer bytes.

    None if it never is, or if a run has no losses.
    """
    if "loss_over_time" not in base or "loss_over_time" not in own:
        return None
    smooth = max(len(base["loss_over_time"]) // 10, 1)
    at = round(REACHED * len(base["loss_over_time"]))
    target = statistics.mean(base["loss_over_time"][at - smooth : at])
    for end in range(smooth, len(own["loss_over_time"]) + 1):
        if statistics.mean(own["loss_over_time"][end - smooth : end]) <= target:
            fewer = sum(base["bytes_over_time"][:at]) / sum(own["bytes_over_time"][:end])
            return end / len(own["loss_over_time"]), fewer
    return None


def _every_controller() -> list[str]:
    names = [
        *DEFAULT,
        "lgreco-window",
        "lgreco-norm",
        "lgreco-adam",
        "lgreco-blocks",
        "lgreco-adam-blocks",
        "lgreco-8",
        "lgreco-narrow",
        "hybrid-window",
        "uniform-bf16",
        "uniform-zeros",
        "lgreco-bf16",
        "lgreco-time",
        "lgreco-position",
        "kmeans-plain",
        "adaqs",
        "gravac-energy",
        "gravac-released",
        SWEEP,
        *DENSITIES,
    ]
    return [*names, UNIFORM]


def show(rows: Sequence[dict[str, Any]]) -> str:
    """A table for each task."""
    tables = []
    for task in dict.fromkeys(row["task"] for row in rows):
        cells = []
        for row in (row for row in rows if row["task"] == task):
            adaptive = row["row"] != DENSE and not row["row"].endswith(UNIFORM)
            bar = None
            if row["target"] is not None:
                bar = f"{row['target']:g}: {'met' if row['fewer'] >= row['target'] else 'NOT met'}"
            cells.append(
                [
                    row["title"],
                    ", ".join(f"{m:.4g}" for m in row["metrics"]),
                    f"{100 * row['mean_worse']:+.2f}" if adaptive else None,
                    f"{row['bytes_per_step']:,.0f}",
                    _fewer(row) if adaptive else None,
                    None if row["compressible"] is None else f"{row['compressible']:,.0f}",
                    _factor(row["fewer_compressible"]) if adaptive else None,
                    bar,
                    f"{100 * row['overhead']:.2f}" if adaptive else None,
                    f"{100 * row['adding']:.2f}" if adaptive else None,
                    row["plans"] if adaptive else None,
                    None if row["density"] is None else f"{100 * row['density']:.2f}",
                    None if row["step_seconds"] is None else f"{1000 * row['step_seconds']:.1f}",
                    _factors(row),
                    _reached(row) if adaptive else None,
                ]
            )
        headers = [
            f"{task}: row", f"{METRICS[task][0]} by seed", "worse by %", "bytes per step", "fewer (second half)",
            "compressible", "fewer", "bar", "overhead %",
            "adding %",
            "plans", "density %", "step ms", "steps by factor", "to loss",
        ]  # fmt: skip
        tables.append(report.table(headers, cells))
    return "\n\n".join(tables)


def _fewer(row: dict[str, Any]) -> str:
    late = row["fewer_late"]
    return f"{row['fewer']:.2f}" + ("" if late is None else f" ({late:.2f})")


def _factor(number: float | None) -> str | None:
    return None if number is None else f"{number:.2f}"


def _reached(row: dict[str, Any]) -> str:
    found = row["reached"]
    fewer = [one[1] for one in found if one]
    steps = ", ".join("never" if one is None else f"{one[0]:.0%}" for one in found)
    return steps + (f"; {statistics.mean(fewer):.1f}x fewer" if fewer else "")


def _factors(row: dict[str, Any]) -> str | None:
    if not row["factors"]:
        return None
    total = sum(row["factors"].values())
    shares = ", ".join(f"{factor}x {count / total:.0%}" for factor, count in row["factors"].items())
    return f"{shares}; floats {row['fewer_floats']:.1f}x fewer"


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_training(parser, TASKS)
    parser.add_argument("--families", default=",".join(f.key for f in FAMILIES))
    parser.add_argument("--controllers", default=",".join(DEFAULT))
    parser.add_argument("--every-steps", type=int, help="steps between decisions, instead of the task's own")
    options = parser.parse_args(arguments)
    check_training(parser, options)
    if options.task is None:
        options.task = [task for task in TASKS if task != RESNET or options.cifar is not None]
    families = [family.key for family in FAMILIES]
    gravac = {arm.key for task in TASKS for arm in gravac_arms(task)}
    for given, possible in (
        (options.families, {*families, "none"}),
        (options.controllers, {*_every_controller(), *gravac}),
    ):
        if unknown := set(given.split(",")) - possible:
            parser.error(f"unknown {', '.join(sorted(unknown))}; there are {', '.join(sorted(possible))}")
    return options


def main() -> int:
    options = parse()
    hosts.exit_on_termination()
    began = time.monotonic()
    kept = convergence.read_runs(options.json) if options.resume and options.json.is_file() else []
    rows = save(options, measure(options, kept))
    print(report.describe(report.machine()))
    print(f"{time.monotonic() - began:.0f} s")
    print(show(rows))
    missed = [
        f"{row['task']}: {row['title']}"
        for row in rows
        if row["target"] is not None and (row["fewer"] < row["target"] or row["mean_worse"] > BAR)
    ]
    print(
        f"bars of L-GreCo, bytes and at most {BAR:.0%} worse: {'NOT met by ' + ', '.join(missed) if missed else 'met'}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
