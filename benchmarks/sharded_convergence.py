"""Held-out loss of a GPT that fully_shard has sharded, trained with quantised weights and gradients.

    python benchmarks/sharded_convergence.py                            # three seeds, 1,500 steps
    python benchmarks/sharded_convergence.py --rows plain-g16,w8g8 --seeds 1 --data wikitext2.txt --json out.json

The model and its settings are those of benchmarks/sharded.py; two hosts of network namespaces, over links that nothing
limits. Rows of one seed start from the same values and see the same batches. The baseline is that of Markov 2024,
section 5.7: float32 weights and float16 gradients.

Columns
    loss      mean cross entropy over the held-out text, with the weights that training computes with
    worse %   relative to the baseline of the same seed: the mean over seeds, and its standard error
    exact     the loss with the optimizer's own weights
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from pathlib import Path

import hosts
import report
from options import positive
from sharded_rank import ROWS, Training, train_rank

BASELINE = "plain-g16"


def summary(losses: dict[str, list[float]], exact: dict[str, list[float]]) -> list[list[object]]:
    """A line for each row."""
    lines: list[list[object]] = []
    base = losses.get(BASELINE)
    for name, found in losses.items():
        worse = None
        if base is not None:
            each = [100 * (mine / theirs - 1) for mine, theirs in zip(found, base, strict=True)]
            error = statistics.stdev(each) / math.sqrt(len(each)) if len(each) > 1 else None
            worse = f"{statistics.mean(each):+.2f}" + (f" ± {error:.2f}" if error is not None else "")
        lines.append(
            [name, ", ".join(f"{x:.4f}" for x in found), worse, ", ".join(f"{x:.4f}" for x in exact[name])]
        )
    return lines


def measure(options: argparse.Namespace) -> None:
    names = options.rows.split(",")
    machine = report.machine()
    print(report.describe(machine))
    losses: dict[str, list[float]] = {name: [] for name in names}
    exact: dict[str, list[float]] = {name: [] for name in names}
    for seed in range(options.seeds):
        for name in names:
            task = Training(name, options.steps, seed, options.data and str(options.data))
            found = hosts.run_task(hosts.Hosts(options.ranks), __file__, task)
            losses[name].append(found[0]["loss"])
            exact[name].append(found[0]["exact_loss"])
            assert len({rank["loss"] for rank in found}) == 1, "all ranks compute with the same weights"
            print(f"seed {seed}, {name}: {losses[name][-1]:.4f}, exact {exact[name][-1]:.4f}", flush=True)
    print(report.table(["row", "loss by seed", "worse %", "exact"], summary(losses, exact)))
    report.write_json(
        options.json,
        {
            "benchmark": "sharded_convergence",
            "machine": machine,
            "steps": options.steps,
            "losses": losses,
            "exact": exact,
        },
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", default="plain-g16,plain,w8g8,w4g4", help=f"of {', '.join(ROWS)}")
    parser.add_argument("--ranks", type=positive, default=2)
    parser.add_argument("--seeds", type=positive, default=3)
    parser.add_argument("--steps", type=positive, default=1500)
    parser.add_argument("--data", type=Path, help="a text file (default: Python's standard library)")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--task", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.task:
        train_rank(Training(**json.loads(options.task)), options.out)
        return 0
    if unknown := [name for name in options.rows.split(",") if name not in ROWS]:
        parser.error(f"unknown rows {', '.join(unknown)}; there are {', '.join(ROWS)}")
    if options.data is not None and not options.data.is_file():
        parser.error(f"--data: there is no file {options.data}")
    hosts.exit_on_termination()
    try:
        measure(options)
    except hosts.HostsError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
