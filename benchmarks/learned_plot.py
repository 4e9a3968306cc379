"""Learning curves of learned compression, as the paper's Figures 10, 11, 13 and 14.

    python benchmarks/learned_plot.py table.json docs

Writes learned-TASK.png for each task of the file: the metric on test data; the loss of training under three
strategies; the loss of the nets while they train, where zeros have 1. Curves are means over seeds. Dotted lines are the
ends of phases 1 and 2.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from convergence_rows import METRICS
from learned_rows import ARMS, EXACT_STEPS, REFERENCE, STRATEGIES, TASKS, TRAIN_STEPS

Run = dict[str, Any]
Curve = Sequence[tuple[float, float]]

#: Figures 10 and 11.
LEARNING = (REFERENCE, "sparse-gd", "dgc", "ring-values", "lgc", "lgc-rate", "lgc-server", "bits-8", "bits-2")
_SMOOTHED = 10
_TITLES = {arm.key: arm.title for arm in ARMS}


def mean_curve(curves: Sequence[Curve]) -> Curve:
    """Of several seeds."""
    return [(points[0][0], fmean(value for _, value in points)) for points in zip(*curves, strict=False)]


def smooth(losses: Sequence[float]) -> Curve:
    """Means of 10 steps, at the step of the whole run."""
    return [
        (EXACT_STEPS + end, fmean(losses[end - _SMOOTHED : end]))
        for end in range(_SMOOTHED, len(losses) + 1, _SMOOTHED)
    ]


def _lines(runs: Sequence[Run], keys: Sequence[str], curve: Callable[[Run], Curve]) -> dict[str, Curve]:
    found = {}
    for key in keys:
        own = [points for run in runs if run["row"] == key and (points := curve(run))]
        if own:
            found[key] = mean_curve(own)
    return found


def draw(task: str, runs: Sequence[Run], out: Path) -> None:
    """The panels of one task; that of strategies where there are two to compare."""
    from matplotlib import pyplot

    strategies = _lines(runs, list(STRATEGIES), lambda run: run["loss_curve"])
    count = 2 + (len(strategies) > 1)
    figure, axes = pyplot.subplots(1, count, figsize=(5.5 * count, 4.5))
    for key, points in _lines(runs, LEARNING, lambda run: run["metric_curve"]).items():
        axes[0].plot(*zip(*points, strict=True), label=_TITLES[key], linewidth=1.2)
    axes[0].set_ylabel(METRICS[task][0])
    axes[0].set_title(f"{task}, on test data")
    trained = [arm.key for arm in ARMS if "feedback" not in arm.key]
    for key, points in _lines(runs, trained, lambda run: smooth(run["nets_loss"])).items():
        axes[1].plot(*zip(*points, strict=True), label=_TITLES[key], linewidth=1.0)
    axes[1].set_ylabel("loss of the nets")
    axes[1].set_title("training of the nets; zeros have 1")
    if count == 3:
        for key, points in strategies.items():
            axes[2].plot(
                *zip(*points, strict=True), label=f"{STRATEGIES[key]}: {_TITLES[key]}", linewidth=1.0
            )
        axes[2].set_ylabel("loss")
        axes[2].set_title("strategies of sparsification")
    for axis in axes:
        axis.set_xlabel("step")
        for end in (EXACT_STEPS, EXACT_STEPS + TRAIN_STEPS):
            axis.axvline(end, color="0.6", linewidth=0.8, linestyle="dotted")
        if axis.get_legend_handles_labels()[0]:
            axis.legend(frameon=False, fontsize=7)
    if task == "lstm":
        axes[0].set_yscale("log")
    figure.tight_layout()
    figure.savefig(out, dpi=80)
    pyplot.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("table", type=Path)
    parser.add_argument("directory", type=Path)
    options = parser.parse_args()
    import matplotlib

    matplotlib.use("Agg")
    runs = json.loads(options.table.read_text(encoding="utf-8"))["runs"]
    for task in TASKS:
        if own := [run for run in runs if run["task"] == task]:
            draw(task, own, options.directory / f"learned-{task}.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
