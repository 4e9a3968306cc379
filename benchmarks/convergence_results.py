"""Runs of the convergence benchmark as rows with verdicts, and as tables."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

import report
from convergence_rows import ARMS, METRICS, ON_REQUEST, REFERENCE, TASKS, Arm

Run = dict[str, Any]

BAR = 0.01
GIGABIT_BYTES_PER_SECOND = 125e6

_ORDER = [arm.key for arm in ARMS]
_KNOWN = {arm.key: arm for arm in ARMS}


def merge(parts: Iterable[Sequence[Run]]) -> list[Run]:
    """All runs of several invocations; of two with the same task, row and seed, the later one."""
    merged = {(run["task"], run["row"], run["seed"]): run for part in parts for run in part}
    for task in (*TASKS, *ON_REQUEST):
        settings = [run["settings"] for (of, _, _), run in merged.items() if of == task]
        if any(other != settings[0] for other in settings):
            different = sorted({str(s) for s in settings})
            raise SystemExit(f"runs of {task} with different settings do not compare: {'; '.join(different)}")
    return list(merged.values())


def evaluate(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """One row per task and arm. ``worse``: relative change for the worse, per pair."""
    rows = []
    for task in (*TASKS, *ON_REQUEST):
        by_row = report.by_row(run for run in runs if run["task"] == task)
        if by_row and REFERENCE not in by_row:
            raise SystemExit(f"{task}: there is no uncompressed run to compare with")
        known = sorted((key for key in by_row if key in _KNOWN), key=_ORDER.index)
        for key in [*known, *(key for key in by_row if key not in _KNOWN)]:
            arm = _KNOWN.get(key, Arm(key, key, key))
            rows.append(_row(task, arm, by_row[key], by_row[REFERENCE]))
    return rows


def _row(task: str, arm: Arm, own: dict[int, Run], reference: dict[int, Run]) -> dict[str, Any]:
    sign = METRICS[task][1]
    seeds = sorted(own.keys() & reference.keys())
    if not seeds:
        raise SystemExit(f"{task}: {arm.title} and uncompressed have no seed in common")
    worse = []
    for seed in seeds:
        change = sign * (own[seed]["metric"] / reference[seed]["metric"] - 1) + 0.0
        worse.append(change if math.isfinite(change) else math.inf)
    runs = [own[seed] for seed in seeds]
    mean = {name: statistics.mean(run[name] for run in runs) for name in ("bytes_per_step", "step_seconds")}
    return {
        "task": task,
        "metric": METRICS[task][0],
        "row": arm.key,
        "title": arm.title,
        "compression": runs[0]["compression"],
        "bar": arm.bar,
        "control": arm.control,
        "note": arm.note,
        "seeds": seeds,
        "metrics": [run["metric"] for run in runs],
        "worse": worse,
        "mean_worse": statistics.mean(worse),
        "passes": statistics.mean(worse) <= BAR,
        "steps": runs[0]["steps"],
        "ratio": statistics.mean(run["ratio"] for run in runs),
        "link": runs[0]["settings"]["link"],
        "seconds": statistics.mean(run["seconds"] for run in runs),
        "modelled_1gbit_seconds": mean["step_seconds"] + mean["bytes_per_step"] / GIGABIT_BYTES_PER_SECOND,
        **mean,
    }


def verdict(row: dict[str, Any]) -> str | None:
    """What became of the 1% bar; in brackets where none was set."""
    if row["row"] == REFERENCE:
        return None
    text = "passes" if row["passes"] else "fails"
    if row["control"]:
        return text if text == "fails" else "passes (NOT as it must)"
    if row["bar"]:
        return text if text == "passes" else "FAILS"
    return f"({text})"


def as_it_must(row: dict[str, Any]) -> bool:
    """Whether the row meets its bar, or is a control that fails; true where nothing is asked."""
    if row["control"]:
        return not row["passes"]
    return row["passes"] or not row["bar"]


def show(rows: Sequence[dict[str, Any]]) -> str:
    """A table for each task."""
    return "\n\n".join(
        _table([row for row in rows if row["task"] == task])
        for task in dict.fromkeys(row["task"] for row in rows)
    )


def _table(rows: Sequence[dict[str, Any]]) -> str:
    link = rows[0]["link"]
    cells = []
    for row in rows:
        compared = row["row"] != REFERENCE
        mean = f"{row['mean_worse'] * 100:+.2f}"
        if len(row["worse"]) > 1 and all(map(math.isfinite, row["worse"])):
            mean += f" ± {statistics.stdev(row['worse']) / math.sqrt(len(row['worse'])) * 100:.2f}"
        cells.append(
            [
                row["title"],
                ", ".join(f"{m:.4g}" for m in row["metrics"]),
                f"{statistics.mean(row['metrics']):.4g}",
                ", ".join(f"{w * 100:+.2f}" for w in row["worse"]) if compared else None,
                mean if compared else None,
                f"{row['bytes_per_step']:,.0f}",
                f"{row['ratio']:.2f}",
                f"{row['step_seconds'] * 1e3:.1f}",
                *([f"{row['modelled_1gbit_seconds'] * 1e3:.1f}"] if link is None else []),
                verdict(row),
                row["note"] or None,
            ]
        )
    headers = [
        f"{rows[0]['task']}: row",
        f"{rows[0]['metric']} by seed",
        "mean",
        "worse by %",
        "mean %",
        "bytes per step",
        "ratio",
        *(["step ms", "1 Gbit/s ms, modelled"] if link is None else [f"step ms, {link}"]),
        "1% bar",
        "paper",
    ]
    return report.table(headers, cells)
