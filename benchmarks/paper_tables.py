"""Rows of a paper beside ours: the paper's number, ours by seed, the change against a base, and what the seeds show."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import report
from convergence_rows import METRICS
from paper_runs import Arm, Pool, Run, timed

#: Percent. Two numbers of a paper that differ by less are called equal.
EQUAL = 0.3
NOT_RUN = "not run"
HEADERS = (
    "paper",
    "paper, worse %",
    "ours, by seed",
    "ours, worse %",
    "deviation",
    "order",
    "bytes a step",
    "ratio",
)


@dataclass(frozen=True)
class Row:
    """A row of a paper's table: its metric there, None if it has none, and how it is trained here."""

    title: str
    arm: Arm
    paper: float | None = None


def worse(own: Sequence[Run], base: Sequence[Run], task: str) -> list[float]:
    """By pair, how much worse the metric is than the base's, in percent; SystemExit for runs that do not compare."""
    if len({(run["steps"], run["source"]) for run in (*own, *base)}) > 1:
        raise SystemExit(f"{task}: runs of different lengths or texts do not compare")
    sign = METRICS[task][1]
    return [
        100 * sign * (run["metric"] / other["metric"] - 1) + 0.0 for run, other in report.pairs(own, base)
    ]


def resolved(changes: Sequence[float]) -> bool:
    """Whether the seeds differ by less than the effect; one seed never resolves anything."""
    return len(changes) > 1 and max(changes) - min(changes) < abs(statistics.mean(changes))


def fewer(own: Sequence[Run], base: Sequence[Run], key: str = "run_bytes_per_step") -> list[float]:
    """By pair, how many times fewer bytes are sent than by the base."""
    return [other[key] / run[key] for run, other in report.pairs(own, base)]


def faster(pool: Pool, arm: Arm, base: Arm) -> str | None:
    """How much more throughput a step of the arm has than one of the base, in percent, where both were timed."""
    own, other = (pool.of(timed(each)) for each in (arm, base))
    if not (own and other):
        return None
    return f"{100 * (other[0]['step_seconds'] / own[0]['step_seconds'] - 1):+.0f}"


def by_seed(runs: Sequence[Run]) -> str:
    """The metrics, those of several machines one machine after another."""
    machines = dict.fromkeys(run["machine"] for run in runs)
    parts = [[f"{run['metric']:.4g}" for run in runs if run["machine"] == machine] for machine in machines]
    return "; ".join(", ".join(part) for part in parts) or NOT_RUN


def order(changes: Sequence[float], paper: float | None) -> str | None:
    """What the seeds show, beside what the paper has. ``paper``: how much worse the row is there, in percent."""
    if not changes:
        return None
    if not resolved(changes):
        return "not resolved"
    ours = "worse" if statistics.mean(changes) > 0 else "better"
    if paper is None:
        return ours
    there = "equal" if abs(paper) < EQUAL else "worse" if paper > 0 else "better"
    return f"{ours}, as there" if ours == there else f"{ours}; there {there}"


def mean_and_range(changes: Sequence[float]) -> str | None:
    if not changes:
        return None
    mean = f"{statistics.mean(changes):+.2f}"
    return f"{mean} ({min(changes):+.2f} to {max(changes):+.2f})" if len(changes) > 1 else mean


def compare(pool: Pool, name: str, base: Row, rows: Sequence[Row]) -> str:
    """A table of rows whose metrics are compared with the base's, seed by seed."""
    reference = pool.of(base.arm)
    lines = [_line(base, reference, [], base)]
    for row in rows:
        runs = pool.of(row.arm)
        lines.append(_line(row, runs, worse(runs, reference, row.arm.task), base))
    return report.table([name, *HEADERS], lines)


def _line(row: Row, runs: Sequence[Run], changes: list[float], base: Row) -> list[object]:
    sign = METRICS[row.arm.task][1]
    there = None
    if row is not base and row.paper is not None and base.paper is not None:
        there = 100 * sign * (row.paper / base.paper - 1) + 0.0
    of_paper = [None if row.paper is None else f"{row.paper:g}", None if there is None else f"{there:+.2f}"]
    if not runs:
        return [row.title, *of_paper, NOT_RUN, None, None, None, None, None]
    deviation = f"{statistics.mean(changes) - there:+.2f}" if changes and there is not None else None
    return [
        row.title,
        *of_paper,
        by_seed(runs),
        mean_and_range(changes),
        deviation,
        order(changes, there),
        f"{statistics.mean(run['bytes_per_step'] for run in runs):,.0f}",
        f"{statistics.mean(run['ratio'] for run in runs):.1f}",
    ]
