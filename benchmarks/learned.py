"""Learned gradient compression (LGC) beside its paper: metric, both ratios, bytes and time by phase, plain codes.

    python benchmarks/learned.py --cifar cifar10_10k.npz --json table.json         # ResNet-20 and the LSTM, 3 seeds
    python benchmarks/learned.py --task lstm --rows lgc,dgc --seeds 1 --json table.json --resume  # what it lacks
    python benchmarks/learned.py --merge a.json b.json                             # tables, nothing is run
    python benchmarks/learned.py --paper                                           # the paper's arithmetic
    python benchmarks/learned.py --times                                           # encode and decode on one core
    python benchmarks/learned_plot.py table.json docs                              # Figures 10, 11, 13 and 14

Tasks, data, seeds and metrics are those of convergence.py. ResNet-20 takes 13 epochs, 1,014 steps, so that with the
paper's 200 + 300 steps half of them send codes. *Ring without codes*: the same leaders and positions, whose values are
summed.
*Plain codes* send at the same positions, in phase 3, 8 or 2 bits a value, or the product with a fixed random matrix:
the bytes of four channels or of one. What they lose is lost, as under LGC.

Columns
    worse %       than the uncompressed run of the same seed and machine: the mean, the least and the most
    paper's way   the gradient over what one rank hands over in a step of phase 3: code or values, and the leader's
                  DEFLATE-coded indices; without what travels exactly: section VI-A, and Table II evidently
    server        of the server form, the rank that sends the code, then the others
    all bytes     an uncompressed run's bytes over those of this run, by the run's own counters: all phases, the way
                  back, first layer, biases, indices, headers
    information   MB that all ranks sent in the whole run: Table II
"""

from __future__ import annotations

import argparse
import datetime
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import compressions
import convergence
import hosts
import learned_codes  # noqa: F401 - registers plain_code
import report
from convergence_results import merge
from convergence_rows import METRICS, RESNET
from convergence_tasks import Settings
from learned_results import Run, evaluate, show
from learned_rows import TASKS, Arm, choose
from options import add_training, check_training

#: 13 x 78 steps.
EPOCHS = 13


def collect(task: str, arm: Arm, found: Sequence[dict[str, Any]], about: dict[str, Any]) -> list[Run]:
    """The runs of a row, all ranks together: losses and what was handed over in the mean, bytes in sum."""
    runs = []
    for ranks in convergence.by_seed(found, f"{task}, {arm.title}"):
        phases = [
            {
                "phase": parts[0]["phase"],
                "steps": parts[0]["steps"],
                "wire_bytes": sum(part["wire_bytes"] for part in parts),
                "step_seconds": max(part["step_seconds"] for part in parts),
                "every_step": _mean([part["every_step"] for part in parts]),
                "as_root": _mean([part["as_root"] for part in parts]),
            }
            for parts in zip(*(run["phases"] for run in ranks), strict=True)
        ]
        losses = [
            [step, round(sum(run["loss_curve"][i][1] for run in ranks) / len(ranks), 4)]
            for i, (step, _) in enumerate(ranks[0]["loss_curve"])
        ]
        runs.append(
            {
                "task": task,
                "row": arm.key,
                "compression": arm.on(task),
                "seed": ranks[0]["seed"],
                **{key: ranks[0][key] for key in ("metric", "steps", "seconds", "parameters", "digest")},
                **{key: ranks[0][key] for key in ("metric_curve", "nets_loss", "plain_loss")},
                "loss_curve": losses,
                "phases": phases,
                "machine": report.processor(),
                "date": datetime.date.today().isoformat(),
                "settings": {**about, "steps": ranks[0]["steps"], "source": found[0]["source"]},
            }
        )
    return runs


def _mean(parts: Sequence[dict[str, float]]) -> dict[str, float]:
    """By key, over the ranks that have it."""
    keys = dict.fromkeys(key for part in parts for key in part)
    own = {key: [part[key] for part in parts if key in part] for key in keys}
    return {key: sum(values) / len(values) for key, values in own.items()}


def measure(options: argparse.Namespace, runs: list[Run], failures: dict[str, str]) -> list[Run]:
    """Every run that is asked for and not there yet, seed by seed; written after each one."""
    settings = Settings(
        0, options.lstm_steps, options.resnet_epochs, _path(options.data), _path(options.cifar)
    )
    about = {"ranks": options.ranks, "link": options.link}
    for task in options.task:
        for seed in range(options.seeds):
            for arm in choose(options.rows):
                if any((run["task"], run["row"], run["seed"]) == (task, arm.key, seed) for run in runs):
                    continue
                name = f"{task}, {arm.title}"
                if name in failures:
                    continue
                reason, found = compressions.why_not(arm.on(task)), None
                if reason is None:
                    report.check_machine(options.json, runs)
                    plan = convergence.Plan(task, arm.on(task), 1.0, (seed,), settings, watch="learned_watch")
                    found = convergence.launch(plan, options.ranks, options.link)
                if found is None:
                    failures[name] = reason or "a rank failed; its error is above"
                    print(f"{name}: left out: {failures[name]}", file=sys.stderr, flush=True)
                    continue
                new = collect(task, arm, found, about)
                runs = merge([runs, new])
                said = f"{METRICS[task][0]} {new[0]['metric']:.4f}, {new[0]['seconds']:.1f} s"
                print(f"{name}, seed {seed}: {said}", file=sys.stderr, flush=True)
                save(options.json, runs, failures)
    return runs


def _path(path: Path | None) -> str | None:
    return None if path is None else str(path.resolve())


def save(path: Path | None, runs: Sequence[Run], failures: dict[str, str]) -> None:
    report.write_runs(path, {"benchmark": "learned", "left_out": failures}, runs)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_training(parser, TASKS)
    parser.set_defaults(resnet_epochs=EPOCHS)
    parser.add_argument("--rows", help="some rows only, comma-separated; see learned_rows.py")
    parser.add_argument("--merge", type=Path, nargs="+", help="run nothing: the tables of these files' runs")
    parser.add_argument("--paper", action="store_true", help="run nothing: the paper's figures, checked")
    parser.add_argument("--times", action="store_true", help="train nothing: encode and decode on one core")
    options = parser.parse_args(arguments)
    check_training(parser, options)
    if options.task is None:
        options.task = [task for task in TASKS if task != RESNET or options.cifar is not None]
    return options


def main() -> int:
    options = parse()
    if options.paper:
        import learned_paper

        print(learned_paper.show())
        return 0
    if options.times:
        import learned_times

        return learned_times.run(options.json)
    failures: dict[str, str] = {}
    began = time.monotonic()
    hosts.exit_on_termination()
    if options.merge:
        runs = merge(convergence.read_runs(path) for path in options.merge)
    else:
        kept = convergence.read_runs(options.json) if options.resume and options.json.is_file() else []
        runs = measure(options, kept, failures)
    save(options.json, runs, failures)
    print(report.describe(report.machine()))
    print(f"{time.monotonic() - began:.0f} s")
    print(show(evaluate(runs)))
    for name, reason in failures.items():
        print(f"left out: {name}: {reason}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
