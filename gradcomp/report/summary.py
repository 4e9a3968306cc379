"""A report shows numbers and texts of a run: the page draws them, and ``--json`` prints them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gradcomp.core.journal import Logged, Run
from gradcomp.core.plan import EXACT, histogram, level_number, level_text, names
from gradcomp.core.run_lines import PERIOD, STEP, ByRank, Gains, Sample, Window

Doubles = npt.NDArray[np.float64]
Row = dict[str, Any]

#: The parts of a step, in order, as the page names them; together they are the step.
REST, BACKWARD, WAITED, SENDING = (
    "forward, data, optimizer",
    "backward",
    "waiting for the last rank",
    "communication",
)
PARTS = (REST, BACKWARD, WAITED, SENDING)

#: At most so many points are shown along the steps; the windows between two of them are averaged.
MOST_POINTS = 120


def summarise(run: Run) -> dict[str, Any]:
    """Returns what the report shows of one run; a part of which the log holds nothing is None or empty."""
    steps = _steps(run.windows)
    ranks = _ranks(run)
    return {
        "run": {
            "version": run.version,
            "ranks": run.world,
            "controller": None if run.controller in ("", "none") else run.controller,
            "compression": run.compression,
            "layers": len(run.layers),
            "elements": sum(layer.size for layer in run.layers),
            "dense_bytes": run.dense_bytes,
        },
        "verdict": _verdict(steps, ranks),
        "steps": steps,
        "ranks": ranks,
        "layers": _layers(run),
        "layer_names": [layer.name for layer in run.layers],
        "plans": _plans(run),
        "gains": _gains(run.gains),
        "residuals": _residuals(run.samples),
        "skipped": [
            {"step": step, "layer": None if layer is None else run.layers[layer].name}
            for window in run.windows
            for step, layer in window.skipped
        ],
        "discarded": sum(window.discarded for window in run.windows),
    }


# -- steps ---------------------------------------------------------------------------------------------------------


def _of_ranks(windows: Sequence[Window], name: str) -> Doubles:
    """Returns a value by window and rank, NaN where it is not known."""
    rows: list[ByRank] = [getattr(window, name) for window in windows]
    return np.array([[np.nan if value is None else value for value in row] for row in rows], dtype=np.float64)


def _mean(values: Doubles, axis: int, weights: Doubles | None = None) -> Doubles:
    """Returns the mean of what is known, NaN where nothing is."""
    known = ~np.isnan(values)
    shares = known * (np.ones_like(values) if weights is None else weights)
    total = shares.sum(axis=axis)
    sums = np.where(known, values * shares, 0.0).sum(axis=axis)
    means: Doubles = np.divide(sums, total, out=np.full(np.shape(total), np.nan), where=total > 0)
    return means


def _steps(windows: Sequence[Window]) -> dict[str, Any] | None:
    """Returns the parts of a step in seconds: of a usual one, and along the run.

    Parts are means over ranks, of which each has the same step. A usual step is the mean of those windows whose steps
    are neither among the fastest quarter nor the slowest: validation and checkpoints make some windows long.
    """
    if not windows:
        return None
    # The last window of a run may hold the times of rank 0 only.
    windows = [window for window in windows if None not in window.seconds] or windows
    by_window = {name: _mean(_of_ranks(windows, name), 1) for name in Window.BY_RANK}
    seconds, exposed, backward = by_window["seconds"], by_window["exposed"], by_window["backward"]
    waited = np.nan_to_num(by_window["waited"])
    parts = np.stack([np.maximum(seconds - exposed - backward, 0.0), backward, waited, exposed - waited])
    known = ~np.isnan(parts).any(axis=0)
    order = np.flatnonzero(known)[np.argsort(seconds[known], kind="stable")]
    quarter = len(order) // 4
    usual = order[quarter : len(order) - quarter]
    counts = np.array([window.steps for window in windows], dtype=np.float64)
    means = _mean(parts[:, usual], 1, counts[usual]) if len(usual) else np.full(len(PARTS), np.nan)
    totals = {
        name: _mean(by_window[name][usual], 0, counts[usual]) for name in ("codec", "wire", "sent_bytes")
    }
    return {
        "first": windows[0].step,
        "steps": int(counts.sum()),
        "seconds": float(means.sum()),
        "parts": dict(zip(PARTS, means.tolist(), strict=True)),
        "exposed": float(means[2:].sum()),
        **{name: float(value) for name, value in totals.items()},
        "along": [
            {
                "step": windows[some[0]].step,
                "end": windows[some[-1]].step + windows[some[-1]].steps,
                "parts": _mean(parts[:, some], 1, counts[some]).tolist(),
                "sent_bytes": float(_mean(by_window["sent_bytes"][some], 0, counts[some])),
            }
            for some in _points(np.flatnonzero(known))
        ],
    }


def _points(rows: npt.NDArray[np.int64]) -> list[npt.NDArray[np.int64]]:
    """Divides rows, in order, among at most :data:`MOST_POINTS` points."""
    return [part for part in np.array_split(rows, min(MOST_POINTS, max(len(rows), 1))) if len(part)]


def _ranks(run: Run) -> list[Row]:
    """Returns what each rank did, and for how many of the steps the others waited for it."""
    windows = [window for window in run.windows if None not in window.last]
    if not windows or run.world == 1:
        return []
    counts = np.array([[window.steps] for window in windows], dtype=np.float64)
    tables = {name: _of_ranks(windows, name) for name in Window.BY_RANK}
    means = {name: _mean(table, 0, counts) for name, table in tables.items()}
    worked, last = means["seconds"] - means["exposed"], tables["last"]
    points = _points(np.arange(len(windows)))
    return [
        {
            "rank": rank,
            "worked": float(worked[rank]),
            "exposed": float(means["exposed"][rank]),
            "waited": float(means["waited"][rank]),
            "sent_bytes": float(means["sent_bytes"][rank]),
            "last_share": float(last[:, rank].sum() / counts.sum()),
            "along": [
                {"step": windows[some[0]].step, "share": float(last[some, rank].sum() / counts[some].sum())}
                for some in points
            ],
        }
        for rank in range(run.world)
    ]


def milliseconds(seconds: float) -> str:
    """Returns a time in milliseconds with three digits."""
    value = 1e3 * seconds
    return f"{value:,.0f} ms" if value >= 99.5 else f"{value:.3g} ms"


def _verdict(steps: dict[str, Any] | None, ranks: Sequence[Row]) -> str:
    if steps is None or not steps["seconds"] > 0:
        return "The log says nothing of the time of steps."
    total, exposed = milliseconds(steps["seconds"]), milliseconds(steps["exposed"])
    share = steps["exposed"] / steps["seconds"]
    text = f"Of a step's {total}, {exposed} ({share:.0%}) are exposed communication"
    waited = steps["parts"][WAITED]
    if ranks:
        most = max(ranks, key=lambda row: row["last_share"])
        text += f", {milliseconds(waited)} of them waiting for the last rank"
        if most["last_share"] > 0:
            text += f"; rank {most['rank']} was waited for in {most['last_share']:.0%} of the steps"
    return text + "."


# -- layers and plans ----------------------------------------------------------------------------------------------


def _latest(samples: Iterable[Sample]) -> dict[int, Sample]:
    return {sample.layer: sample for sample in samples}


def _layers(run: Run) -> list[Row]:
    """Returns every layer under the last plan, those that send most first."""
    shown = run.in_force()
    if shown is None:
        return []
    named = names(a.compressor for a in shown.plan.assignments)
    by_step = _latest(sample for sample in run.samples if sample.over == STEP)
    by_period = _latest(sample for sample in run.samples if sample.over == PERIOD)
    rows = []
    for number, layer in enumerate(run.layers):
        a = shown.plan.by_layer[layer.name]
        sample, period = by_step.get(number), by_period.get(number)
        is_exact = named[a.compressor] == EXACT
        rows.append(
            {
                "name": layer.name,
                "elements": layer.size,
                "dense_bytes": 2 * layer.nbytes * (run.world - 1) // run.world,
                "bytes": None if shown.layer_bytes is None else shown.layer_bytes[number],
                "compressor": named[a.compressor],
                "level": level_text(a.compressor, a.level),
                "error": 0.0 if is_exact else _of(sample, "error"),
                "period_error": _of(period, "error"),
                "norm": _of(sample, "norm"),
                "residual": _of(sample, "residual"),
            }
        )
    return sorted(rows, key=lambda row: (-(row["bytes"] or 0), -row["elements"]))


def _of(sample: Sample | None, name: str) -> float | None:
    value: float | None = None if sample is None else getattr(sample, name)
    return value


def _plans(run: Run) -> list[Row]:
    """Returns the plans in order, each with the share of elements by level and the reason for it."""
    elements = {layer.name: layer.size for layer in run.layers}
    return [
        {
            "step": logged.step,
            "version": logged.plan.version,
            "predicted_bytes": logged.predicted_bytes,
            "measured_bytes": logged.measured_bytes,
            "ratio": run.ratio(logged.predicted_bytes),
            "layers": histogram(logged.plan),
            "reason": "; ".join(text for step, text in run.choices if step == logged.step),
            "levels": _levels(logged, elements),
            "level_by_layer": _level_by_layer(logged, run),
        }
        for logged in run.plans
    ]


def _levels(logged: Logged, elements: dict[str, int]) -> list[Row]:
    """Returns the elements by compressor and level, the highest level first and exact layers last."""
    named = names(a.compressor for a in logged.plan.assignments)
    sums: dict[tuple[str, float, str], int] = {}
    for a in logged.plan.assignments:
        key = named[a.compressor], level_number(a.level), level_text(a.compressor, a.level)
        sums[key] = sums.get(key, 0) + elements[a.layer]
    order = sorted(sums, key=lambda key: (key[0] == EXACT, key[0], -key[1]))
    return [{"level": f"{key[0]} {key[2]}".strip(), "elements": sums[key]} for key in order]


def _level_by_layer(logged: Logged, run: Run) -> list[str]:
    named, by_layer = names(a.compressor for a in logged.plan.assignments), logged.plan.by_layer
    found = [by_layer[layer.name] for layer in run.layers]
    return [f"{named[a.compressor]} {level_text(a.compressor, a.level)}".strip() for a in found]


# -- GraVAC and residuals ------------------------------------------------------------------------------------------


def _gains(gains: Sequence[Gains]) -> dict[str, Any] | None:
    """Returns the course of GraVAC's search: of the model, or the median over layers that have rows of their own."""
    if not gains:
        return None
    by_step: dict[int, list[Gains]] = {}
    for one in gains:
        by_step.setdefault(one.step, []).append(one)
    steps = [list(by_step.values())[some[-1]] for some in _points(np.arange(len(by_step)))]
    last = steps[-1]
    factors = [factor.factor for factor in last[0].factors]
    return {
        "rows": len(last),
        "epsilon": last[0].epsilon,
        "along": [
            {
                "step": rows[0].step,
                "prior": sum(row.prior for row in rows),
                "post": [sum(row.post[k] for row in rows) for k in range(2)],
                "corrected": sum(row.corrected or 0.0 for row in rows),
                "minimum": float(np.median([row.minimum for row in rows])),
                "candidate": float(np.median([row.candidate for row in rows])),
                "gains": _by_factor(rows, "gain"),
            }
            for rows in steps
        ],
        "factors": [
            {"factor": factor, "gain": gain, "throughput": throughput, "steps": sent}
            for factor, gain, throughput, sent in zip(
                factors,
                _by_factor(last, "gain"),
                _by_factor(last, "throughput"),
                _by_factor(last, "steps", sum),
                strict=True,
            )
        ],
    }


def _by_factor(
    rows: Sequence[Gains], name: str, merge: Callable[[Sequence[float]], Any] = np.median
) -> list[float | None]:
    """Returns a value of every factor, merged over the rows in which it is known; None if it is in none."""
    found: list[float | None] = []
    for of_factor in zip(*(row.factors for row in rows), strict=True):
        known = [value for factor in of_factor if (value := getattr(factor, name)) is not None]
        found.append(float(merge(known)) if known else None)
    return found


def _residuals(samples: Sequence[Sample]) -> list[Row]:
    """Returns residual norms over gradient norms along the run: the median and the largest of the sampled layers."""
    ratios = [(s.step, s.residual / s.norm) for s in samples if s.residual is not None and s.norm > 0]
    if not ratios:
        return []
    steps, values = np.array(ratios).T
    points = [
        some for some in np.array_split(np.arange(len(steps)), min(60, -(-len(steps) // 4))) if len(some)
    ]
    return [
        {
            "step": int(steps[some[0]]),
            "median": float(np.median(values[some])),
            "largest": float(values[some].max()),
        }
        for some in points
    ]
