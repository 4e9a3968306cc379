"""Runs of the benchmark of learned compression as rows, and as tables."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import report
from convergence_rows import METRICS
from learned_rows import ARMS, EQUAL_BYTES, REFERENCE, TASKS, Arm
from paper_tables import mean_and_range, order

Run = dict[str, Any]

_KNOWN = {arm.key: arm for arm in ARMS}
_FLOAT = 4
CODES = "codes"
#: Means of NETS_EVERY losses at the end of the nets' training that are averaged.
_LAST = 2


def handed(phase: dict[str, Any], root: bool) -> float:
    """Bytes that one rank's compressors hand over in a step of a phase; with ``root`` those of the rank that leads."""
    every: float = sum(phase["every_step"].values())
    return every + (sum(phase["as_root"].values()) if root else 0.0)


def paper_ratio(run: Run, root: bool = True) -> float | None:
    """Section VI-A: size of one rank's gradient over that of what it compressed, in phase 3.

    None where no step of a phase 3 handed over anything: an uncompressed run, or one that is too short.
    """
    found = [handed(phase, root) for phase in run["phases"] if phase["phase"] == CODES]
    return _FLOAT * run["parameters"] / found[0] if found and found[0] else None


def run_bytes(run: Run) -> int:
    """What all ranks sent in the whole run."""
    return sum(phase["wire_bytes"] for phase in run["phases"])


def paper_bytes(run: Run) -> float:
    """Table II's *information*: what the ranks hand over in the whole run; exact steps count as whole gradients."""
    ranks, total = run["settings"]["ranks"], 0.0
    for phase in run["phases"]:
        every, root = handed(phase, False), sum(phase["as_root"].values())
        step = ranks * every + root if every + root else ranks * _FLOAT * run["parameters"]
        total += phase["steps"] * step
    return total


def evaluate(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """One row per task and arm, compared with the uncompressed runs of the same seeds where there are some."""
    rows = []
    for task in TASKS:
        by_row = report.by_row(run for run in runs if run["task"] == task)
        reference = by_row.get(REFERENCE, {})
        rows += [_row(task, arm, by_row[arm.key], reference) for arm in ARMS if arm.key in by_row]
    return rows


def _row(task: str, arm: Arm, own: dict[int, Run], reference: dict[int, Run]) -> dict[str, Any]:
    sign, seeds = METRICS[task][1], sorted(own)
    paired = report.pairs(own.values(), reference.values())
    worse = [100 * sign * (run["metric"] / base["metric"] - 1) + 0.0 for run, base in paired]
    runs = [own[seed] for seed in seeds]
    nets = [run["nets_loss"][-_LAST:] for run in runs if run["nets_loss"]]
    server = paper_ratio(runs[0], root=False) if "form=server" in runs[0]["compression"] else None
    return {
        "task": task,
        "row": arm.key,
        "title": arm.title,
        "compression": runs[0]["compression"],
        "steps": runs[0]["steps"],
        "seeds": seeds,
        "metrics": [run["metric"] for run in runs],
        "worse": worse,
        "paper_ratio": _mean_of(paper_ratio(run) for run in runs),
        "paper_ratio_others": server,
        "all_ratio": _mean_of(run_bytes(base) / run_bytes(run) for run, base in paired),
        "paper_bytes": _mean_of(paper_bytes(run) for run in runs),
        "phases": [_phase([run["phases"][i] for run in runs]) for i in range(len(runs[0]["phases"]))],
        "ranks": runs[0]["settings"]["ranks"],
        "nets_loss": _mean_of(statistics.fmean(loss) for loss in nets) if nets else None,
        "plain_loss": runs[-1].get("plain_loss") or None,
        "parameters": runs[0]["parameters"],
    }


def _mean_of(found: Any) -> float | None:
    known = [value for value in found if value is not None]
    return statistics.fmean(known) if known else None


def _phase(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        "phase": parts[0]["phase"],
        "bytes_per_step": statistics.fmean(part["wire_bytes"] / part["steps"] for part in parts),
        "step_seconds": statistics.fmean(part["step_seconds"] for part in parts),
        "every": statistics.fmean(handed(part, False) for part in parts),
        "root": statistics.fmean(handed(part, True) - handed(part, False) for part in parts),
    }


def show(rows: Sequence[dict[str, Any]]) -> str:
    """The tables of each task."""
    parts = []
    for task in dict.fromkeys(row["task"] for row in rows):
        own = [row for row in rows if row["task"] == task]
        found = (
            ratios(task, own),
            handed_over(task, own),
            times({task: own}),
            equal_bytes(task, own),
            lost(task, own),
        )
        parts += [table for table in found if table is not None]
    return "\n\n".join(parts)


def ratios(
    task: str, rows: Sequence[dict[str, Any]], paper: Mapping[str, tuple[float, str]] | None = None
) -> str:
    """Metrics and ratios. ``paper``: by row, the metric that the paper has, and its ratio."""
    cells = []
    for row in rows:
        ratio = row["paper_ratio"] and f"{row['paper_ratio']:,.0f}"
        if row["paper_ratio_others"]:
            ratio = f"{ratio}/{row['paper_ratio_others']:,.0f}"
        there, changes = None, [] if row["row"] == REFERENCE else row["worse"]
        of_paper: list[str | None] = []
        if paper is not None:
            metric, printed = paper.get(row["row"], (None, None))
            if metric is not None and row["row"] != REFERENCE:
                there = 100 * METRICS[task][1] * (metric / paper[REFERENCE][0] - 1)
            of_paper = [metric and f"{metric:g}", None if there is None else f"{there:+.2f}", printed]
        cells.append(
            [
                row["title"],
                *of_paper,
                ", ".join(f"{m:.4g}" for m in row["metrics"]),
                mean_and_range(changes),
                order(changes, there),
                ratio,
                row["all_ratio"] and f"{row['all_ratio']:.2f}",
                f"{row['paper_bytes'] / 1e6:,.1f}",
                row["nets_loss"] and f"{row['nets_loss']:.3f}",
            ]
        )
    of_paper = [] if paper is None else ["paper", "paper, worse %", "paper, ratio"]
    headers = [
        f"{task}: row", *of_paper, f"{METRICS[task][0]} by seed", "worse %", "order", "ratio, paper's way",
        "ratio, all bytes", "information, MB", "loss of the nets",
    ]  # fmt: skip
    return report.table(headers, cells)


def handed_over(task: str, rows: Sequence[dict[str, Any]]) -> str:
    """What one rank sends in a step of each phase, and what it hands over in phase 3."""
    cells = []
    for row in rows:
        last = row["phases"][-1] if row["phases"][-1]["phase"] == CODES else None
        sent = [f"{phase['bytes_per_step'] / row['ranks']:,.0f}" for phase in row["phases"]]
        of_codes = [f"{last[key]:,.0f}" if last and last[key] else None for key in ("every", "root")]
        cells.append([row["title"], *_by_phase(sent), *of_codes])
    headers = [f"{task}: row", "bytes, phase 1", "2", "3", "of 3: handed over", "the leader, more"]
    return report.table(headers, cells)


def times(rows: Mapping[str, Sequence[dict[str, Any]]], paper: Mapping[str, str] | None = None) -> str:
    """Milliseconds of a step in each phase, by row and task. ``paper``: by row, what the paper has."""
    by_task = {task: {row["row"]: row for row in own} for task, own in rows.items()}
    cells = []
    for key in dict.fromkeys(key for own in by_task.values() for key in own):
        found = [own[key]["phases"] if key in own else [] for own in by_task.values()]
        shown = [
            part for phases in found for part in _by_phase([f"{1e3 * p['step_seconds']:.1f}" for p in phases])
        ]
        cells.append([_KNOWN[key].title, *shown, *([] if paper is None else [paper.get(key)])])
    headers = [title for task in by_task for title in (f"{task}, phase 1", "2", "3")]
    return report.table(["ms a step", *headers, *([] if paper is None else ["paper"])], cells)


def _by_phase(shown: Sequence[str]) -> list[str | None]:
    return [*shown, *([None] * (3 - len(shown)))]


def equal_bytes(task: str, rows: Sequence[dict[str, Any]]) -> str | None:
    """Every learned code beside the plain ones of its bytes."""
    sign, by_key = METRICS[task][1], {row["row"]: row for row in rows}
    cells = []
    for learned, plain in EQUAL_BYTES.items():
        for other in plain:
            if learned not in by_key or other not in by_key:
                continue
            a, b = by_key[learned], by_key[other]
            common = [seed for seed in a["seeds"] if seed in b["seeds"]]
            pairs = [(_at(a, seed), _at(b, seed)) for seed in common]
            better = sum(sign * (mine - theirs) < 0 for mine, theirs in pairs)
            cells.append(
                [
                    a["title"],
                    b["title"],
                    f"{a['phases'][-1]['every']:,.0f}",
                    f"{b['phases'][-1]['every']:,.0f}",
                    ", ".join(f"{mine:.4g}" for mine, _ in pairs),
                    ", ".join(f"{theirs:.4g}" for _, theirs in pairs),
                    f"{better} of {len(pairs)}",
                ]
            )
    headers = [
        f"{task}: learned",
        "plain",
        "bytes",
        "bytes",
        METRICS[task][0],
        METRICS[task][0],
        "learned is better in",
    ]
    return report.table(headers, cells) if cells else None


def lost(task: str, rows: Sequence[dict[str, Any]]) -> str | None:
    """What codes lose of one run's values in phase 2; zeros lose 1."""
    measured = [row for row in rows if row["plain_loss"]]
    if not measured:
        return None
    # The loss of a server's nets is that of each rank's values.
    ring = [row for row in rows if row["nets_loss"] and "form=server" not in row["compression"]]
    cells = [[row["title"], f"{row['nets_loss']:.3f}"] for row in ring]
    cells += [[_KNOWN[key].title, f"{loss:.2g}"] for key, loss in measured[-1]["plain_loss"].items()]
    return report.table([f"{task}: code", "lost, of the squared norm of the mean"], cells)


def _at(row: dict[str, Any], seed: int) -> float:
    found: float = row["metrics"][row["seeds"].index(seed)]
    return found
