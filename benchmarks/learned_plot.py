"""Learning curves of learned compression, as the paper's Figures 10, 11, 13 and 14.

    python benchmarks/learned_plot.py table.json docs

Writes learned-TASK.png for each task of the file: the metric on test data; the loss of training under three
strategies; the loss of the nets while they train, where zeros have 1. Curves are means over seeds, in a band of one
standard error to each side. Dotted lines are the ends of phases 1 and 2.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from convergence_rows import METRICS
from learned_rows import ARMS, EXACT_STEPS, NETS_EVERY, REFERENCE, STRATEGIES, TASKS, TRAIN_STEPS

from gradcomp.contrib.figures import drawing, look

Run = dict[str, Any]
Curve = Sequence[tuple[float, float]]

#: Figures 10 and 11.
LEARNING = (REFERENCE, "sparse-gd", "dgc", "ring-values", "lgc", "lgc-rate", "lgc-server", "bits-8", "bits-2")
_TITLES = {arm.key: arm.title for arm in ARMS}


def mean_curve(curves: Sequence[Curve]) -> Curve:
    """Of several seeds."""
    return [(points[0][0], fmean(value for _, value in points)) for points in zip(*curves, strict=False)]


def errors(curves: Sequence[Curve]) -> list[float]:
    """Standard error of each point of the mean curve; none of a single seed."""
    if len(curves) < 2:
        return []
    scale = 1 / math.sqrt(len(curves))
    return [scale * stdev(value for _, value in points) for points in zip(*curves, strict=False)]


def while_training(run: Run) -> Curve:
    """The loss of the nets, at the step of the whole run."""
    return [(EXACT_STEPS + NETS_EVERY * (part + 1), loss) for part, loss in enumerate(run["nets_loss"])]


def _curves(
    runs: Sequence[Run], keys: Sequence[str], curve: Callable[[Run], Curve]
) -> dict[str, list[Curve]]:
    """By row that has any, one for each seed."""
    found = {key: [points for run in runs if run["row"] == key and (points := curve(run))] for key in keys}
    return {key: own for key, own in found.items() if own}


def _draw_lines(axis: Any, found: Mapping[str, list[Curve]], titles: Mapping[str, str]) -> None:
    for number, (key, own) in enumerate(found.items()):
        style = look(number, marked=False)
        steps, means = zip(*mean_curve(own), strict=True)
        axis.plot(steps, means, **style, label=titles[key])
        if spread := errors(own):
            pairs = list(zip(means, spread, strict=True))
            low, high = [m - e for m, e in pairs], [m + e for m, e in pairs]
            axis.fill_between(steps, low, high, color=style["color"], alpha=0.15, linewidth=0)


def draw(task: str, runs: Sequence[Run], out: Path) -> None:
    """The panels of one task; that of strategies where there are two to compare."""
    strategies = _curves(runs, list(STRATEGIES), lambda run: run["loss_curve"])
    count = 2 + (len(strategies) > 1)
    with drawing(out, 5.5 * count, 5.5) as figure:
        axes = figure.subplots(1, count)
        _draw_lines(axes[0], _curves(runs, LEARNING, lambda run: run["metric_curve"]), _TITLES)
        axes[0].set_ylabel(METRICS[task][0])
        axes[0].set_title(f"{task}, on test data")
        trained = [arm.key for arm in ARMS if "feedback" not in arm.key]
        _draw_lines(axes[1], _curves(runs, trained, while_training), _TITLES)
        axes[1].set_ylabel("loss of the nets")
        axes[1].set_title("training of the nets; zeros have 1")
        if count == 3:
            titles = {key: f"{strategy}: {_TITLES[key]}" for key, strategy in STRATEGIES.items()}
            _draw_lines(axes[2], strategies, titles)
            axes[2].set_ylabel("loss")
            axes[2].set_title("strategies of sparsification")
        for axis in axes:
            axis.set_xlabel("step")
            for end in (EXACT_STEPS, EXACT_STEPS + TRAIN_STEPS):
                axis.axvline(end, color="0.6", linewidth=0.8, linestyle="dotted")
            if axis.get_legend_handles_labels()[0]:
                axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12))
        if task == "lstm":
            axes[0].set_yscale("log")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("table", type=Path)
    parser.add_argument("directory", type=Path)
    options = parser.parse_args()
    runs = json.loads(options.table.read_text(encoding="utf-8"))["runs"]
    for task in TASKS:
        if own := [run for run in runs if run["task"] == task]:
            draw(task, own, options.directory / f"learned-{task}.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
