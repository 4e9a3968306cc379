"""Figures from the file of adaptive.py: what controllers send over training, and where; metric against bytes or time.

    python benchmarks/adaptive_plot.py table.json adaptive.png
    python benchmarks/adaptive_plot.py table.json --sweep sweep.png    # from --controllers sweep

Rows of the first, by task and family: bytes that the uniform level sends over those of each controller, in fiftieths of
the run, one seed (Markov et al. 2024, Figure 6a); kilobytes of each layer, averaged over the run, in the order in
which layers are sent (Markov et al. 2024, Figure 6b, whose buckets hold several); final metric against bytes per
step, every seed a point. The second: final metric against milliseconds per step, over levels as references (Markov et
al. 2024, Figure 2).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from adaptive_rows import FAMILIES, GPT, LSTM, UNIFORM
from convergence_rows import METRICS

Run = dict[str, Any]

_KEYS = {family.key for family in FAMILIES}
_OVER_TIME = "bytes_over_time"


def draw(runs: Sequence[Run], out: Path) -> None:
    """One column per task and family that has a uniform run."""
    from matplotlib import pyplot

    by_row: dict[tuple[str, str], list[Run]] = defaultdict(list)
    for run in runs:
        by_row[run["task"], run["row"]].append(run)
    columns = [
        (task, family)
        for task in dict.fromkeys(run["task"] for run in runs)
        for family in FAMILIES
        if (task, f"{family.key}-{UNIFORM}") in by_row
    ]
    if not columns:
        raise SystemExit("there is no uniform run to compare with")
    figure, axes = pyplot.subplots(3, len(columns), figsize=(4.2 * len(columns), 10), squeeze=False)
    there = {run["row"].partition("-")[2] for run in runs if run["row"].split("-")[0] in _KEYS}
    names = sorted(there, key=lambda name: (name != UNIFORM, name))
    colours = {name: f"C{i}" for i, name in enumerate(names)}
    for (task, family), (upper, middle, lower) in zip(columns, axes.T, strict=True):
        for name in names:
            own = by_row[task, f"{family.key}-{name}"]
            pairs = _pairs(by_row[task, f"{family.key}-{UNIFORM}"], own)
            if name != UNIFORM and pairs:
                ratio = [u / max(o, 1.0) for u, o in zip(*(run[_OVER_TIME] for run in pairs[0]), strict=True)]
                part = [100 * (i + 1) / len(ratio) for i in range(len(ratio))]
                upper.plot(part, ratio, label=name, color=colours[name], linewidth=1.2)
            sent = [run["run_bytes_per_step"] / 1e3 for run in own]
            lower.scatter(sent, [run["metric"] for run in own], label=name, color=colours[name], s=22)
            if planned := next((run for run in own if run.get("plans")), None):
                sizes = layer_kilobytes(task, planned)
                middle.plot(list(sizes.values()), label=name, color=colours[name], marker=".", linewidth=0.8)
                if name == "lgreco":  # whose first plan is the uniform one
                    sizes = layer_kilobytes(task, {**planned, "plans": planned["plans"][:1]})
                    middle.plot(list(sizes.values()), color=colours[UNIFORM], marker=".", linewidth=0.8)
        upper.set_title(f"{task}, {family.title}")
        upper.set_xlabel("% of the run")
        upper.set_ylabel("times fewer bytes than uniform")
        upper.axhline(1.0, color="0.6", linewidth=0.8)
        middle.set_xlabel("compressed layer, in the order of sending")
        middle.set_ylabel("kB per step and rank")
        middle.set_yscale("log")
        lower.set_xlabel("kB per step and rank")
        lower.set_ylabel(METRICS[task][0])
    handles = [pyplot.Line2D([], [], color=colours[n], marker="o", linestyle="none", label=n) for n in names]
    figure.legend(handles=handles, loc="lower center", ncol=min(len(names), 9), frameon=False)
    figure.tight_layout(rect=(0, 0.04, 1, 1))
    figure.savefig(out, dpi=80)


def _pairs(uniform: Sequence[Run], own: Sequence[Run]) -> list[tuple[Run, Run]]:
    """Runs of one seed that both know what was sent when."""
    known = {run["seed"]: run for run in uniform if _OVER_TIME in run}
    return [(known[run["seed"]], run) for run in own if run["seed"] in known and _OVER_TIME in run]


def layer_kilobytes(task: str, run: Run) -> dict[str, float]:
    """What two ranks send of each layer that a plan ever compressed, the last one first; averaged over the steps."""
    from gradcomp import LayerSpec
    from gradcomp.compress import at_level
    from gradcomp.control.candidates import layer_bytes
    from gradcomp.core.scheme import Scheme
    from gradcomp.core.topology import Topology

    begins = [step for step, _ in run["plans"]]
    ends = [*begins[1:], run["steps"] + 1]
    compressed = {layer for _, plan in run["plans"] for layer, _, level in plan if level is not None}
    shapes = {name: tuple(p.shape) for name, p in _model(task).named_parameters()}
    found: dict[str, float] = dict.fromkeys(reversed([name for name in shapes if name in compressed]), 0.0)
    for begin, end, (_, plan) in zip(begins, ends, run["plans"], strict=True):
        for name, family, level in plan:
            if name in found:
                sent = layer_bytes(
                    at_level(family, level),
                    LayerSpec(name, shapes[name]),
                    Scheme("sra"),
                    Topology.one_host(2),
                )
                found[name] += (end - begin) / (run["steps"] + 1 - begins[0]) * sent / 1e3
    return found


def _model(task: str) -> Any:
    import models
    from convergence_tasks import GPT_SHAPE, LSTM_VOCABULARY, LSTM_WIDTH

    if task == GPT:
        return models.WordGPT(**GPT_SHAPE)
    return models.WordLSTM(LSTM_VOCABULARY, LSTM_WIDTH) if task == LSTM else models.ResNet((3, 3, 3), 16)


def draw_sweep(runs: Sequence[Run], out: Path) -> None:
    """One panel per task and family that has levels as references."""
    from matplotlib import pyplot

    curves: dict[tuple[str, str], dict[str, dict[str, list[Run]]]] = {}
    for run in runs:
        key, _, name = run["row"].partition("-")
        family, _, level = key.partition("@")
        if level:
            panel = curves.setdefault((run["task"], family), {})
            panel.setdefault(name, {}).setdefault(level, []).append(run)
    if not curves:
        raise SystemExit("there is no run of a sweep: --controllers sweep")
    figure, axes = pyplot.subplots(1, len(curves), figsize=(5.5 * len(curves), 4), squeeze=False)
    titles = {family.key: family.title for family in FAMILIES}
    for ((task, family), panel), axis in zip(curves.items(), axes[0], strict=True):
        for name, levels in panel.items():
            points = [
                (1e3 * fmean(run["step_seconds"] for run in own), fmean(run["metric"] for run in own))
                for own in levels.values()
            ]
            axis.plot(*zip(*points, strict=True), marker="o", linewidth=1.0, label=name)
            for level, point in zip(levels, points, strict=True):
                axis.annotate(level, point, xytext=(3, 3), textcoords="offset points", fontsize=8)
        axis.set_title(f"{task}, {titles[family]}, by reference")
        axis.set_xlabel("ms per step")
        axis.set_ylabel(METRICS[task][0])
        axis.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(out, dpi=80)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("table", type=Path)
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--sweep", type=Path)
    options = parser.parse_args()
    if (options.out is None) == (options.sweep is None):
        parser.error("give one path for a figure, or --sweep and one")
    import matplotlib

    matplotlib.use("Agg")
    runs = json.loads(options.table.read_text(encoding="utf-8"))["runs"]
    if options.sweep is not None:
        draw_sweep(runs, options.sweep)
    else:
        draw(runs, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
