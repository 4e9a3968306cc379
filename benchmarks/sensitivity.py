"""L-GreCo by the loss and by the norm of the error: do tables, plans and results agree? Markov et al. 2024, figure 7a.

    python benchmarks/sensitivity.py --cifar cifar10_10k.npz                 # ResNet-20, the LSTM and the GPT, 3 seeds
    python benchmarks/sensitivity.py --task lstm --families rank --seeds 1 --json sensitivity.json

The tasks and references are those of adaptive.py. In the row "loss" the controller measures, after every period, the
change of the loss on a batch that is held back, for each layer and choice, and the norms of the same errors. The row
"norm" decides by the norm of the error of gradients summed over the same window, 50 steps.

First table, by level and over all of a task's tables: the correlation over layers of the losses with the norms, by rank
(Spearman) and linear (Pearson), and with the squared norms (linear). Second table: what both metrics decide from the
same tables: the share of layers that get the same level, the mean distance of levels in steps of the range, and the
bytes of each plan over those of the reference. Third table: the runs, to the end.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import convergence
import hosts
import numpy as np
import report
from adaptive import collect
from adaptive_rows import EVERY, FAMILIES, RESNET, TASKS, Arm, Family
from convergence_rows import METRICS
from convergence_tasks import Settings
from options import add_training, check_training

Run = dict[str, Any]
WINDOW = 50
ROWS = ("uniform", "norm", "loss")


def arms(
    task: str, families: Sequence[str], every_steps: int | None, probes: int
) -> list[tuple[Family, Arm]]:
    every = every_steps or EVERY[task]
    forms = {
        "uniform": "",
        "norm": f"lgreco:every_steps={every},metric=norm,window={WINDOW},widen=false",
        "loss": f"lgreco:every_steps={every},metric=loss,window={WINDOW},widen=false,probes_per_step={probes}",
    }
    return [
        (
            family,
            Arm(f"{family.key}-{name}", f"{family.title}, {name}", family.compression[task], form, family),
        )
        for family in FAMILIES
        if family.key in families
        for name, form in forms.items()
    ]


def ranked(values: np.ndarray) -> np.ndarray:
    """Ranks from 0; equal values get the mean of theirs."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    means: np.ndarray = (ends - (counts + 1) / 2)[inverse]
    return means


def correlation(x: np.ndarray, y: np.ndarray) -> float | None:
    """Pearson's; None where one of the two does not vary."""
    if len(x) < 3 or not np.ptp(x) or not np.ptp(y):
        return None
    return float(np.corrcoef(x, y)[0, 1])


def correlations(tables: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """By level, in the mean over tables, and over all cells of a table; those without any loss are left out."""
    found: dict[str, list[tuple[float | None, ...]]] = {}
    for table in tables:
        cells: dict[str, list[tuple[float, float]]] = {}
        for levels, norms, losses in zip(table["levels"], table["norms"], table["losses"], strict=True):
            for level, norm, loss in zip(levels, norms, losses, strict=True):
                if norm > 0 and np.isfinite(loss):
                    cells.setdefault(f"{level:g}", []).append((norm, loss))
        cells["all"] = [cell for each in cells.values() for cell in each]
        for level, each in cells.items():
            norm, loss = np.array(each, dtype=np.float64).T
            one = correlation(ranked(norm), ranked(loss)), correlation(norm, loss), correlation(norm**2, loss)
            found.setdefault(level, []).append(one)
    rows = []
    for level, each in found.items():
        means = [
            statistics.mean(known) if (known := [v for v in values if v is not None]) else None
            for values in zip(*each, strict=True)
        ]
        rows.append(
            {"level": level, **dict(zip(("spearman", "pearson", "pearson_squared"), means, strict=True))}
        )
    return rows


def plans(tables: Sequence[dict[str, Any]], other: str) -> dict[str, float]:
    """Compares the decisions by the loss with those by another metric, in the mean over tables."""
    same, distance, bytes_loss, bytes_other = [], [], [], []
    for table in tables:
        loss, one = np.array(table["chosen"]["loss"]), np.array(table["chosen"][other])
        same.append(float((loss == one).mean()))
        distance.append(float(np.abs(loss - one).mean()))
        costs = [np.array(each) for each in table["costs"]]
        total = sum(c[k] for c, k in zip(costs, table["reference"], strict=True))
        bytes_loss.append(sum(c[k] for c, k in zip(costs, loss, strict=True)) / total)
        bytes_other.append(sum(c[k] for c, k in zip(costs, one, strict=True)) / total)
    return {
        "same": statistics.mean(same),
        "distance": statistics.mean(distance),
        "bytes_loss": statistics.mean(bytes_loss),
        "bytes_other": statistics.mean(bytes_other),
    }


def measure(options: argparse.Namespace, runs: list[Run]) -> list[Run]:
    """Every run that is asked for and not there yet; written after each."""
    paths = [path and str(path.resolve()) for path in (options.data, options.cifar)]
    settings = Settings(60, options.lstm_steps, options.resnet_epochs, *paths)
    for task in options.task:
        for family, arm in arms(task, options.families.split(","), options.every_steps, options.probes):
            if arm.key.rpartition("-")[2] not in options.rows.split(","):
                continue
            done = {run["seed"] for run in runs if (run["task"], run["row"]) == (task, arm.key)}
            seeds = tuple(seed for seed in range(options.seeds) if seed not in done)
            if not seeds:
                continue
            watch = "sensitivity_watch" if arm.key.endswith("-loss") else ""
            plan = convergence.Plan(task, arm.compression, 1.0, seeds, settings, arm.controller, watch=watch)
            found = convergence.launch(plan, options.ranks, options.link)
            if found is None:
                raise SystemExit(f"{task}, {arm.title}: a rank failed; its error is above")
            for run in collect(task, arm, found):
                runs.append({**run, "family": family.key})
                name = f"{task}, {arm.title}, seed {run['seed']}: {METRICS[task][0]} {run['metric']:.4f}"
                print(
                    f"{name}, {run['run_bytes_per_step']:,.0f} bytes a step, {run['seconds']:.1f} s",
                    file=sys.stderr,
                )
            save(options, runs)
    return runs


def save(options: argparse.Namespace, runs: list[Run]) -> None:
    about = {
        name: getattr(options, name) for name in ("lstm_steps", "resnet_epochs", "every_steps", "probes")
    }
    report.write_json(
        options.json,
        {"benchmark": "sensitivity", "machine": report.machine(), "settings": about, "runs": runs},
    )


def show(runs: Sequence[Run]) -> str:
    """The three tables."""
    first, second, third = [], [], []
    for task, key in dict.fromkeys((run["task"], run["family"]) for run in runs):
        own = [run for run in runs if (run["task"], run["family"]) == (task, key)]
        tables = [table for run in own for table in run.get("tables", [])]
        if tables:
            for row in correlations(tables):
                kinds = ("spearman", "pearson", "pearson_squared")
                figures = [None if row[k] is None else f"{row[k]:.2f}" for k in kinds]
                first.append([f"{task}, {key}", row["level"], *figures])
            for other in ("norm", "squared"):
                one = plans(tables, other)
                ratios = [f"{one[k]:.3f}" for k in ("bytes_loss", "bytes_other")]
                second.append(
                    [
                        f"{task}, {key}",
                        other,
                        len(tables),
                        f"{one['same']:.0%}",
                        f"{one['distance']:.2f}",
                        *ratios,
                    ]
                )
        for name in ROWS:
            found = [run for run in own if run["row"] == f"{key}-{name}"]
            if not found:
                continue
            spent = [max(s.get("probe", 0.0) for s in run["spent_by_rank"]) / run["seconds"] for run in found]
            third.append(
                [
                    f"{task}, {key}, {name}",
                    ", ".join(f"{run['metric']:.4g}" for run in found),
                    f"{statistics.mean(run['metric'] for run in found):.4g}",
                    f"{statistics.mean(run['bytes_per_step'] for run in found):,.0f}",
                    f"{100 * statistics.mean(spent):.1f}" if name == "loss" else None,
                ]
            )
    return "\n\n".join(
        (
            report.table(["family", "level", "Spearman", "Pearson", "Pearson, squared norm"], first),
            report.table(
                ["family", "loss against", "tables", "same level", "distance", "bytes, loss", "bytes, other"],
                second,
            ),
            report.table(
                ["row", "metric by seed", "mean", "bytes a step, second half", "losses % of time"], third
            ),
        )
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_training(parser, TASKS)
    parser.add_argument("--families", default="bits,rank")
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--every-steps", type=int, help="steps between decisions, instead of the task's own")
    parser.add_argument("--probes", type=int, default=4, help="losses that a rank measures after a step")
    options = parser.parse_args()
    check_training(parser, options)
    options.task = options.task or [t for t in TASKS if t != RESNET or options.cifar is not None]
    for given, known in ((options.families, [family.key for family in FAMILIES]), (options.rows, ROWS)):
        if unknown := set(given.split(",")) - set(known):
            parser.error(f"unknown {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    hosts.exit_on_termination()
    began = time.monotonic()
    kept = convergence.read_runs(options.json) if options.resume and options.json.is_file() else []
    runs = measure(options, kept)
    save(options, runs)
    print(report.describe(report.machine()))
    print(f"{time.monotonic() - began:.0f} s")
    print(show(runs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
