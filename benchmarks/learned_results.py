"""Runs of the benchmark of learned compression as rows, and as tables."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

import report
from convergence_rows import METRICS
from learned_rows import ARMS, EQUAL_BYTES, REFERENCE, TASKS, Arm

Run = dict[str, Any]

_KNOWN = {arm.key: arm for arm in ARMS}
_FLOAT = 4
CODES = "codes"
#: Losses at the end of the nets' training that are averaged.
_LAST = 20


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
    paired = [seed for seed in seeds if seed in reference]
    worse = [sign * (own[seed]["metric"] / reference[seed]["metric"] - 1) for seed in paired]
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
        "worse": [change if math.isfinite(change) else math.inf for change in worse],
        "paper_ratio": _mean_of(paper_ratio(run) for run in runs),
        "paper_ratio_others": server,
        "all_ratio": _mean_of(run_bytes(reference[seed]) / run_bytes(own[seed]) for seed in paired),
        "run_bytes": _mean_of(run_bytes(run) for run in runs),
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
    """Tables for each task: metric and ratios; bytes and time by phase; learned and plain codes of equal bytes."""
    parts = []
    for task in dict.fromkeys(row["task"] for row in rows):
        own = [row for row in rows if row["task"] == task]
        parts += [_ratios(task, own), _by_phase(task, own)]
        if equal := _equal(task, own):
            parts.append(equal)
        if lost := _losses(task, own):
            parts.append(lost)
    return "\n\n".join(parts)


def _ratios(task: str, rows: Sequence[dict[str, Any]]) -> str:
    cells = []
    for row in rows:
        paper = row["paper_ratio"] and f"{row['paper_ratio']:,.0f}"
        if row["paper_ratio_others"]:
            paper = f"{paper}/{row['paper_ratio_others']:,.0f}"
        cells.append(
            [
                row["title"],
                ", ".join(f"{m:.4g}" for m in row["metrics"]),
                f"{statistics.fmean(row['metrics']):.4g}",
                _worse(row),
                paper,
                row["all_ratio"] and f"{row['all_ratio']:.2f}",
                f"{row['paper_bytes'] / 1e6:,.1f}",
                f"{row['run_bytes'] / 1e6:,.1f}",
                row["nets_loss"] and f"{row['nets_loss']:.3f}",
            ]
        )
    headers = [
        f"{task}: row", f"{METRICS[task][0]} by seed", "mean", "worse by %", "ratio, paper's", "ratio, all bytes",
        "information, paper's, MB", "all bytes, MB", "loss of the nets",
    ]  # fmt: skip
    return report.table(headers, cells)


def _worse(row: dict[str, Any]) -> str | None:
    if row["row"] == REFERENCE or not row["worse"]:
        return None
    text = f"{100 * statistics.fmean(row['worse']):+.2f}"
    if len(row["worse"]) > 1 and all(map(math.isfinite, row["worse"])):
        text += f" ± {100 * statistics.stdev(row['worse']) / math.sqrt(len(row['worse'])):.2f}"
    return text


def _by_phase(task: str, rows: Sequence[dict[str, Any]]) -> str:
    """What one rank sends in a step, and how long that takes; in phase 3 also what is handed over."""
    cells = []
    for row in rows:
        phases = row["phases"]
        last = phases[-1] if phases[-1]["phase"] == CODES else None
        cells.append(
            [
                row["title"],
                *(f"{phase['bytes_per_step'] / row['ranks']:,.0f}" for phase in phases),
                *([None] * (3 - len(phases))),
                f"{last['every']:,.0f}" if last and last["every"] else None,
                f"{last['root']:,.0f}" if last and last["root"] else None,
                *(f"{1e3 * phase['step_seconds']:.0f}" for phase in phases),
                *([None] * (3 - len(phases))),
            ]
        )
    headers = [
        f"{task}: row",
        "bytes, phase 1",
        "2",
        "3",
        "of 3: handed over",
        "the leader, more",
        "ms, phase 1",
        "2",
        "3",
    ]
    return report.table(headers, cells)


def _equal(task: str, rows: Sequence[dict[str, Any]]) -> str | None:
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


def _losses(task: str, rows: Sequence[dict[str, Any]]) -> str | None:
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
