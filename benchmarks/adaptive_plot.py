"""Figures from the file of adaptive.py: what controllers send over training, and where; metric against bytes or time.

    python benchmarks/adaptive_plot.py table.json adaptive.png
    python benchmarks/adaptive_plot.py table.json --sweep sweep.png    # from --controllers sweep

Rows of the first, by task and family: bytes that the uniform level sends over those of each controller, in fiftieths of
the run, one seed (Markov et al. 2024, Figure 6a); kilobytes of each layer, averaged over the run, in the order in
which layers are sent (Markov et al. 2024, Figure 6b, whose buckets hold several); final metric against bytes per
step, every seed a point. The second: final metric against milliseconds per step, over levels as references, means and
standard errors over seeds (Markov et al. 2024, Figure 2).
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from adaptive_rows import FAMILIES, GPT, LSTM, UNIFORM
from convergence_rows import METRICS

from gradcomp.contrib.figures import REFERENCE_COLOUR, drawing, look, whole_numbers

Run = dict[str, Any]

_KEYS = {family.key for family in FAMILIES}
_OVER_TIME = "bytes_over_time"


def draw(runs: Sequence[Run], out: Path) -> None:
    """One column per task and family that has a uniform run."""
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
    there = {run["row"].partition("-")[2] for run in runs if run["row"].split("-")[0] in _KEYS}
    names = sorted(there, key=lambda name: (name != UNIFORM, name))
    # The uniform level is the reference: grey. The others keep their looks in all panels.
    looks = {name: look(i - 1) for i, name in enumerate(names)}
    looks[UNIFORM] = {"color": REFERENCE_COLOUR, "linestyle": "-", "marker": "X"}
    with drawing(out, 4.2 * len(columns), 10) as figure:
        for (task, family), panels in zip(
            columns, figure.subplots(3, len(columns), squeeze=False).T, strict=True
        ):
            _draw_column(panels, task, family.key, by_row, looks)
            panels[0].set_title(f"{task}, {family.title}")
        handles: dict[str, Any] = {}
        for axis in figure.axes:
            for handle, name in zip(*axis.get_legend_handles_labels(), strict=True):
                handles.setdefault(name, handle)
        named = [name for name in names if name in handles]
        figure.legend(
            [handles[name] for name in named], named, loc="outside lower center", ncols=5, title="controller"
        )


def _draw_column(
    panels: Sequence[Any],
    task: str,
    family: str,
    by_row: Mapping[tuple[str, str], list[Run]],
    looks: Mapping[str, dict[str, Any]],
) -> None:
    """Three panels of one task and family: over the run, over layers, metric against bytes."""
    upper, middle, lower = panels
    for name, style in looks.items():
        own = by_row.get((task, f"{family}-{name}"), [])
        pairs = _pairs(by_row[task, f"{family}-{UNIFORM}"], own)
        if name != UNIFORM and pairs:
            ratio = [u / max(o, 1.0) for u, o in zip(*(run[_OVER_TIME] for run in pairs[0]), strict=True)]
            part = [100 * (i + 1) / len(ratio) for i in range(len(ratio))]
            upper.plot(part, ratio, **style | {"marker": ""})
        sent = [run["run_bytes_per_step"] / 1e3 for run in own]
        lower.plot(sent, [run["metric"] for run in own], **style | {"linestyle": "none"}, label=name)
        if planned := next((run for run in own if run.get("plans")), None):
            sizes = layer_kilobytes(task, planned)
            middle.plot(range(1, len(sizes) + 1), list(sizes.values()), **style)
            if name == "lgreco":  # whose first plan is the uniform one
                sizes = layer_kilobytes(task, {**planned, "plans": planned["plans"][:1]})
                middle.plot(range(1, len(sizes) + 1), list(sizes.values()), **looks[UNIFORM])
    upper.set_xlabel("% of the run")
    upper.set_ylabel("times fewer bytes than uniform")
    upper.axhline(1.0, color=REFERENCE_COLOUR, linewidth=0.8)
    middle.set_xlabel("number of the compressed layer, in the order of sending")
    middle.set_ylabel("kB per step and rank")
    middle.set_yscale("log")
    whole_numbers(middle.xaxis)
    lower.set_xlabel("kB per step and rank")
    lower.set_ylabel(METRICS[task][0])


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
    curves: dict[tuple[str, str], dict[str, dict[str, list[Run]]]] = {}
    for run in runs:
        key, _, name = run["row"].partition("-")
        family, _, level = key.partition("@")
        if level:
            panel = curves.setdefault((run["task"], family), {})
            panel.setdefault(name, {}).setdefault(level, []).append(run)
    if not curves:
        raise SystemExit("there is no run of a sweep: --controllers sweep")
    titles = {family.key: family.title for family in FAMILIES}
    with drawing(out, 5.5 * len(curves), 4) as figure:
        axes = figure.subplots(1, len(curves), squeeze=False)[0]
        for ((task, family), panel), axis in zip(curves.items(), axes, strict=True):
            for number, (name, levels) in enumerate(panel.items()):
                times = [_mean([1e3 * run["step_seconds"] for run in own]) for own in levels.values()]
                metrics = [_mean([run["metric"] for run in own]) for own in levels.values()]
                (x, x_errors), (y, y_errors) = zip(*times, strict=True), zip(*metrics, strict=True)
                axis.errorbar(x, y, y_errors, x_errors, **look(number), capsize=2, label=name)
                for level, point in zip(levels, zip(x, y, strict=True), strict=True):
                    axis.annotate(
                        level, point, xytext=(4, 4 + 9 * number), textcoords="offset points", fontsize=7
                    )
            axis.set_title(f"{task}, {titles[family]}; numbers: the reference level")
            axis.set_xlabel("ms per step")
            axis.set_ylabel(METRICS[task][0])
            axis.legend(title="controller")


def _mean(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard error; the error of a single seed is 0."""
    return fmean(values), stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


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
    runs = json.loads(options.table.read_text(encoding="utf-8"))["runs"]
    if options.sweep is not None:
        draw_sweep(runs, options.sweep)
    else:
        draw(runs, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
