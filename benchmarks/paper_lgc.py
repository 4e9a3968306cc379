"""The tables of Abrahamyan et al. 2021 (LGC) at our scale, and what they say of each other."""

from __future__ import annotations

from typing import Any

import learned_paper
from convergence_rows import RESNET
from learned_results import equal_bytes, evaluate, handed_over, lost, ratios, times
from learned_rows import TASKS
from paper_runs import Arm, Measurement, Results, Run, cost
from paper_tables import NOT_RUN

ARMS: list[Arm] = []
BASES: list[Arm] = []
_DATA = ("--data={data}", "--cifar={cifar}")
_TRIED = ("--rows=lgc", "--task=lstm", "--lstm-steps=2", "--seeds=1")
MEASUREMENTS = [
    Measurement("lgc", "learned.py", _DATA, _TRIED, resumes=True, hosts=False),
    Measurement(
        "lgc-times",
        "learned.py",
        (*_DATA, "--rows=ring-values,lgc,lgc-1,lgc-server", "--link=1gbit", "--seeds=1", "--resnet-epochs=7",
         "--lstm-steps=560"),
        (*_TRIED, "--link=1gbit"),
    ),
]  # fmt: skip

#: Table IV, ResNet-50 on CIFAR-10: accuracy in percent, and the ratio. ScaleCom is in Table II alone.
TABLE_4 = {
    "none": (91.88, "1"),
    "sparse-gd": (91.82, "1,000"),
    "dgc": (93.2, "1,000"),
    "lgc": (91.4, "3,193"),
    "lgc-server": (93.27, "5,709/8,616"),
}
#: Table III, seconds: ResNet-50 on ImageNet, eight nodes.
TABLE_3 = {"lgc": "1, 0.9, 0.4 s", "lgc-server": "1, 1.6, 0.6 s"}


def tables(found: Results) -> dict[str, str]:
    runs, timed = ((found.measured(name) or {"runs": []})["runs"] for name in ("lgc", "lgc-times"))
    parts: dict[str, str | None] = {
        "cost": cost([*runs, *timed]),
        "table-3": times(_by_task(timed), TABLE_3) if timed else None,
        "contradictions": learned_paper.show(),
    }
    for task, rows in _by_task(runs).items():
        parts[f"table-4-{task}"] = ratios(task, rows, TABLE_4 if task == RESNET else None) if rows else None
        parts[f"phases-{task}"] = handed_over(task, rows) if rows else None
        parts[f"equal-bytes-{task}"] = equal_bytes(task, rows)
        parts[f"lost-{task}"] = lost(task, rows)
    return {place: table or f"{NOT_RUN.capitalize()}." for place, table in parts.items()}


def _by_task(runs: list[Run]) -> dict[str, list[dict[str, Any]]]:
    rows = evaluate(runs)
    return {task: [row for row in rows if row["task"] == task] for task in TASKS}
