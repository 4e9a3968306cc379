"""Figures from the file of adaptive.py: how much is sent over training, and metric against bytes.

    python benchmarks/adaptive_plot.py table.json adaptive.png

Upper row: bytes that uniform levels send over those of each controller, in fiftieths of the run, first seed (000,
Figure 6a). Lower row: final metric against bytes per step, every seed a point (000, Figure 2, with bytes for time).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from adaptive_rows import FAMILIES, UNIFORM
from convergence_rows import METRICS


def draw(runs: list[dict[str, Any]], out: Path) -> None:
    """One column per task and family that has a uniform run."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    first = {(run["task"], run["row"]): run for run in reversed(runs)}
    columns = [
        (task, family)
        for task in dict.fromkeys(run["task"] for run in runs)
        for family in FAMILIES
        if (task, f"{family.key}-{UNIFORM}") in first
    ]
    if not columns:
        raise SystemExit("there is no uniform run to compare with")
    figure, axes = pyplot.subplots(2, len(columns), figsize=(4.2 * len(columns), 7), squeeze=False)
    names = list(
        dict.fromkeys(run["row"].partition("-")[2] for run in runs if run["row"].split("-")[0] in _KEYS)
    )
    colours = {name: f"C{i}" for i, name in enumerate(names)}
    for (task, family), upper, lower in zip(columns, axes[0], axes[1], strict=True):
        base = first[task, f"{family.key}-{UNIFORM}"]["bytes_over_time"]
        for name in names:
            row = f"{family.key}-{name}"
            own = [run for run in runs if (run["task"], run["row"]) == (task, row)]
            if not own:
                continue
            if name != UNIFORM:
                ratio = [
                    u / max(o, 1.0) for u, o in zip(base, first[task, row]["bytes_over_time"], strict=True)
                ]
                part = [100 * (i + 1) / len(ratio) for i in range(len(ratio))]
                upper.plot(part, ratio, label=name, color=colours[name], linewidth=1.2)
            points = [(run["run_bytes_per_step"] / 1e3, run["metric"]) for run in own]
            lower.scatter(*zip(*points, strict=True), label=name, color=colours[name], s=22)
        upper.set_title(f"{task}, {family.title}")
        upper.set_xlabel("% of the run")
        upper.set_ylabel("times fewer bytes than uniform")
        upper.axhline(1.0, color="0.6", linewidth=0.8)
        lower.set_xlabel("kB per step and rank")
        lower.set_ylabel(METRICS[task][0])
    handles = [pyplot.Line2D([], [], color=colours[n], marker="o", linestyle="none", label=n) for n in names]
    figure.legend(handles=handles, loc="lower center", ncol=min(len(names), 8), frameon=False)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    figure.savefig(out, dpi=110)


_KEYS = {family.key for family in FAMILIES}


def main() -> int:
    if len(sys.argv) != 3:
        print(__doc__, file=sys.stderr)
        return 2
    draw(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))["runs"], Path(sys.argv[2]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
