"""Vega-Lite specifications of the report's charts; text from the log enters as data only, never as an expression."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from gradcomp.core.plan import EXACT
from gradcomp.report.summary import BACKWARD, PARTS, REST, SENDING, WAITED, Row

Spec = dict[str, Any]

#: Colours that differ for readers with colour vision deficiency, at least 3:1 against both of the page's backgrounds.
COLOURS = (
    "#2f7ec7",
    "#c8590f",
    "#15877a",
    "#b4568f",
    "#8a7a12",
    "#7267cf",
    "#c6483f",
    "#4d8a3a",
    "#5f7d95",
    "#a5662f",
)
PLAIN = "#7d8590"
OF_PART = {REST: PLAIN, BACKWARD: COLOURS[2], WAITED: COLOURS[1], SENDING: COLOURS[0]}

#: Layers and plans that have a mark of their own; the others are counted.
MOST_LAYERS, MOST_PLANS, MOST_RANKS = 30, 60, 32
#: Longest text beside an axis and in a legend, in pixels.
_LABEL, _IN_LEGEND = 150, 180
#: Letters that fit beside an axis, and twice into a legend.
_SHORT = 20
#: Pixels of a band.
_BAND = 18

_STEP = {"field": "step", "type": "quantitative", "title": "step", "scale": {"zero": False, "nice": False}}


def _chart(data: Sequence[Row], height: int, **spec: Any) -> Spec:
    about = {"width": "container", "height": height, "autosize": {"type": "fit-x", "contains": "padding"}}
    return {**about, "data": {"values": list(data)}, **spec}


def _banded(data: Sequence[Row], field: str, **spec: Any) -> Spec:
    """Returns a chart with a band for each value of ``field``."""
    return _chart(data, _BAND * max(len({row[field] for row in data}), 1), **spec)


def _legend(names: Sequence[str]) -> Spec:
    """Returns a legend that is no wider than a phone."""
    columns = 2 if max(map(len, names), default=0) <= _SHORT else 1
    return {"orient": "bottom", "columns": columns, "labelLimit": _IN_LEGEND, "title": None}


def _colour(field: str, names: Sequence[str], colours: Sequence[str]) -> Spec:
    scale: Spec = {"domain": list(names), "range": list(colours)}
    return {"field": field, "type": "nominal", "scale": scale, "legend": _legend(names)}


def parts_along(summary: dict[str, Any]) -> Spec:
    """Returns the parts of a step along the run, in milliseconds, one on the other."""
    rows = [
        {"step": point["step"], "end": point["end"], "part": part, "order": number, "ms": 1e3 * seconds}
        for point in summary["steps"]["along"]
        for number, (part, seconds) in enumerate(zip(PARTS, point["parts"], strict=True))
    ]
    for row in rows:
        row["ms"] = round(row["ms"], 4)
    encoding = {
        "x": {**_STEP, "bin": "binned"},
        "x2": {"field": "end"},
        "y": {"field": "ms", "type": "quantitative", "title": "ms a step", "stack": "zero"},
        "order": {"field": "order"},
        "color": _colour("part", PARTS, [OF_PART[part] for part in PARTS]),
        "tooltip": [
            {"field": "part", "type": "nominal"},
            {"field": "step", "type": "quantitative"},
            {"field": "ms", "type": "quantitative", "format": ".3g"},
        ],
    }
    return _chart(rows, 240, mark={"type": "bar", "binSpacing": 0}, encoding=encoding)


def last_by_rank(ranks: Sequence[Row]) -> Spec:
    """Returns for how many steps each rank was waited for."""
    shown = sorted(ranks, key=lambda row: -row["last_share"])[:MOST_RANKS]
    rows = [{"rank": f"rank {row['rank']}", "share": round(row["last_share"], 5)} for row in shown]
    encoding = {
        "y": {"field": "rank", "type": "nominal", "title": None, "sort": None},
        "x": {
            "field": "share",
            "type": "quantitative",
            "title": "steps in which it was waited for",
            "axis": {"format": "%"},
        },
        "tooltip": [{"field": "rank"}, {"field": "share", "format": ".1%"}],
    }
    return _banded(rows, "rank", mark={"type": "bar", "color": OF_PART[WAITED]}, encoding=encoding)


def last_along(ranks: Sequence[Row]) -> Spec:
    """Returns when each rank was waited for."""
    shown = sorted(ranks, key=lambda row: -row["last_share"])[:MOST_RANKS]
    every = max(len(ranks[0]["along"]) // 60, 1)
    rows = [
        {"rank": f"rank {row['rank']}", "step": str(point["step"]), "share": round(point["share"], 4)}
        for row in shown
        for point in row["along"][::every]
    ]
    encoding = {
        "y": {"field": "rank", "type": "nominal", "title": None, "sort": None},
        "x": {
            "field": "step", "type": "ordinal", "sort": None, "title": "step",
            "axis": {"labelOverlap": "greedy", "labelSeparation": 12, "labelAngle": 0},
        },
        "opacity": {
            "field": "share", "type": "quantitative", "scale": {"domain": [0, 1], "range": [0, 1]}, "legend": None,
        },
        "tooltip": [{"field": "rank"}, {"field": "step"}, {"field": "share", "type": "quantitative", "format": ".0%"}],
    }  # fmt: skip
    return _banded(rows, "rank", mark={"type": "rect", "color": OF_PART[WAITED]}, encoding=encoding)


def _layer_axis() -> Spec:
    return {"field": "label", "type": "nominal", "title": None, "sort": None, "axis": {"labelLimit": _LABEL}}


def _labels(names: Sequence[str]) -> dict[str, str]:
    """Returns the ends of long names, which tell layers apart better than their beginnings; equal ends stay whole."""
    ends = {name: name if len(name) <= _SHORT else "…" + name[1 - _SHORT :].lstrip(".") for name in names}
    counts = Counter(ends.values())
    return {name: end if counts[end] == 1 else name for name, end in ends.items()}


def bytes_by_layer(layers: Sequence[Row]) -> Spec:
    """Returns the bytes that the largest layers send a step, in front of those of an uncompressed exchange."""
    labels = _labels([row["name"] for row in layers[:MOST_LAYERS]])
    rows = [
        {
            "name": row["name"],
            "label": labels[row["name"]],
            "sent": row["bytes"],
            "dense": row["dense_bytes"],
            "how": _how(row),
        }
        for row in layers[:MOST_LAYERS]
        if row["bytes"] is not None
    ]
    tooltip = [{"field": name, "type": "nominal"} for name in ("name", "how", "sent", "dense")]
    axes: Spec = {"y": _layer_axis(), "tooltip": tooltip}
    x: Spec = {"type": "quantitative", "title": "bytes a step", "axis": {"format": "~s"}}
    layer = [
        {
            "mark": {"type": "bar", "color": PLAIN, "opacity": 0.35},
            "encoding": {**axes, "x": {**x, "field": "dense"}},
        },
        {
            "mark": {"type": "bar", "color": COLOURS[0], "size": 8},
            "encoding": {**axes, "x": {**x, "field": "sent"}},
        },
    ]
    return _banded(rows, "label", layer=layer)


def _how(row: Row) -> str:
    return f"{row['compressor']} {row['level']}".strip()


def errors_by_layer(layers: Sequence[Row]) -> Spec:
    """Returns the measured errors of the largest layers."""
    names = {"error": "one step", "period_error": "controller's period"}
    labels = _labels([row["name"] for row in layers[:MOST_LAYERS]])
    rows = [
        {"name": row["name"], "label": labels[row["name"]], "error": round(row[key], 5), "of": of}
        for row in layers[:MOST_LAYERS]
        for key, of in names.items()
        if row[key] is not None and row["compressor"] != EXACT
    ]
    shown = [of for of in names.values() if any(row["of"] == of for row in rows)]
    encoding = {
        "y": _layer_axis(),
        "x": {"field": "error", "type": "quantitative", "title": "relative error, ||p - C(p)|| / ||p||"},
        "color": _colour("of", shown, COLOURS),
        "tooltip": [
            {"field": "name"},
            {"field": "of"},
            {"field": "error", "type": "quantitative", "format": ".3g"},
        ],
    }
    return _banded(
        rows, "name", mark={"type": "point", "filled": True, "size": 60, "opacity": 1}, encoding=encoding
    )


def _plans(plans: Sequence[Row], end: int) -> list[tuple[int, int, Row]]:
    """Returns the plans that are drawn, each with its first step and the one after its last."""
    every = -(-len(plans) // MOST_PLANS)
    shown = [*plans[::every]]
    ends = [*(plan["step"] for plan in shown[1:]), max(end, shown[-1]["step"] + 1)]
    return [
        (plan["step"], until, plan) for plan, until in zip(shown, ends, strict=True) if until > plan["step"]
    ]


def _levels(plans: Sequence[Row]) -> dict[str, str]:
    """Returns a colour for every level, the same one in all charts; rare levels share the last."""
    sums: dict[str, float] = {}
    for plan in plans:
        for row in plan["levels"]:
            sums[row["level"]] = sums.get(row["level"], 0) + row["elements"]
    common = sorted((level for level in sums if level != EXACT), key=lambda level: -sums[level])
    colours = {level: COLOURS[min(k, len(COLOURS) - 1)] for k, level in enumerate(common)}
    if len(common) > len(COLOURS):
        kept = common[: len(COLOURS) - 1]
        colours = {level: colours.get(level, "") if level in kept else COLOURS[-1] for level in common}
    return {**colours, EXACT: PLAIN}


def _by_level(levels: dict[str, str], used: Sequence[str]) -> Spec:
    """Returns the colours of the levels that are used, in a column; the legend names no more than have a colour."""
    shown = [level for level in levels if level in set(used)]
    colours = _colour("level", shown, [levels[level] for level in shown])
    named = shown if len(shown) <= len(COLOURS) + 1 else shown[: len(COLOURS) - 1]
    colours["legend"] = {**_legend(shown), "values": named, "columns": 1}
    return colours


def levels_along(plans: Sequence[Row], end: int) -> Spec:
    """Returns the share of elements by level along the run."""
    rows = []
    for begin, until, plan in _plans(plans, end):
        total = max(sum(row["elements"] for row in plan["levels"]), 1)
        for order, row in enumerate(plan["levels"]):
            share = round(row["elements"] / total, 5)
            rows.append({"step": begin, "end": until, "level": row["level"], "order": order, "share": share})
    encoding = {
        "x": {**_STEP, "bin": "binned"},
        "x2": {"field": "end"},
        "y": {
            "field": "share", "type": "quantitative", "title": "elements by level", "stack": "normalize",
            "axis": {"format": "%"},
        },
        "order": {"field": "order"},
        "color": _by_level(_levels(plans), [row["level"] for row in rows]),
        "tooltip": [
            {"field": "level"},
            {"field": "step", "type": "quantitative"},
            {"field": "share", "type": "quantitative", "format": ".1%"},
        ],
    }  # fmt: skip
    return _chart(rows, 200, mark={"type": "bar", "binSpacing": 0}, encoding=encoding)


def levels_by_layer(plans: Sequence[Row], names: Sequence[str], shown: Sequence[str], end: int) -> Spec:
    """Returns the levels of the layers ``shown`` along the run; ``names`` are all layers' in the run's order."""
    numbers, labels = {name: number for number, name in enumerate(names)}, _labels(shown)
    rows: list[Row] = []
    for name in shown:
        before: Row | None = None
        for begin, until, plan in _plans(plans, end):
            level = plan["level_by_layer"][numbers[name]]
            if before is not None and before["level"] == level:
                before["end"] = until
            else:
                before = {"name": name, "label": labels[name], "step": begin, "end": until, "level": level}
                rows.append(before)
    encoding = {
        "y": _layer_axis(),
        "x": {**_STEP, "bin": "binned"},
        "x2": {"field": "end"},
        "color": _by_level(_levels(plans), [row["level"] for row in rows]),
        "tooltip": [{"field": key, "type": "nominal"} for key in ("name", "level", "step", "end")],
    }
    return _banded(rows, "label", mark={"type": "bar", "binSpacing": 0, "height": 12}, encoding=encoding)


def _lines(
    rows: Sequence[Row], title: str, names: Sequence[str], rule: float | None = None, log: bool = False
) -> Spec:
    """Returns lines of ``value`` over steps, one for each ``name``; a dashed line at ``rule``."""
    scale = {"type": "log"} if log else {"zero": True}
    encoding = {
        "x": _STEP,
        "y": {"field": "value", "type": "quantitative", "title": title, "scale": scale},
        "color": _colour("name", names, COLOURS),
        "tooltip": [
            {"field": "name"},
            {"field": "step", "type": "quantitative"},
            {"field": "value", "type": "quantitative", "format": ".4g"},
        ],
    }
    lines = {"mark": {"type": "line", "point": {"size": 14}, "strokeWidth": 1.5}, "encoding": encoding}
    if rule is None:
        return _chart(rows, 220, **lines)
    dashed = {
        "data": {"values": [{"value": rule}]},
        "mark": {"type": "rule", "strokeDash": [5, 4], "color": PLAIN},
        "encoding": {"y": {"field": "value", "type": "quantitative"}},
    }
    return _chart(rows, 220, layer=[lines, dashed])


def gains_along(gains: dict[str, Any]) -> Spec:
    """Returns the gain of every factor along the run, and epsilon: Figures 4d, 5d and 6d of the paper."""
    factors = [row["factor"] for row in gains["factors"]]
    names = [f"{factor:g}x" for factor in factors]
    rows = [
        {"step": point["step"], "name": name, "value": gain}
        for point in gains["along"]
        for name, gain in zip(names, point["gains"], strict=True)
        if gain is not None
    ]
    known = [name for name in names if any(row["name"] == name for row in rows)]
    return _lines(rows, "compression gain", known, gains["epsilon"])


def norms_along(gains: dict[str, Any]) -> Spec:
    """Returns gradients before and after compression: panels a and b of Figures 4, 5 and 6."""
    names = ["before compression", "at the minimum factor", "at the candidate", "with the residual"]
    rows = [
        {"step": point["step"], "name": name, "value": value}
        for point in gains["along"]
        for name, value in zip(names, (point["prior"], *point["post"], point["corrected"]), strict=True)
        if value
    ]
    known = [name for name in names if any(row["name"] == name for row in rows)]
    return _lines(rows, "sum of norms", known, log=True)


def factors_along(gains: dict[str, Any]) -> Spec:
    """Returns the two factors between which every step chooses, along the run."""
    rows = [
        {"step": point["step"], "name": name, "value": point[name]}
        for point in gains["along"]
        for name in ("minimum", "candidate")
    ]
    return _lines(rows, "compression factor", ["minimum", "candidate"], log=True)


def by_factor(gains: dict[str, Any], key: str, title: str) -> Spec:
    """Returns a bar for each factor: steps as in Figures 7b to 9b, or throughput as in 7c to 9c."""
    rows = [
        {"factor": f"{row['factor']:g}x", key: row[key]} for row in gains["factors"] if row[key] is not None
    ]
    encoding = {
        "x": {
            "field": "factor",
            "type": "nominal",
            "sort": None,
            "title": "compression factor",
            "axis": {"labelAngle": 0},
        },
        "y": {"field": key, "type": "quantitative", "title": title},
        "tooltip": [{"field": "factor"}, {"field": key, "type": "quantitative", "format": ".4g"}],
    }
    return _chart(
        rows, 180, mark={"type": "bar", "color": COLOURS[0], "width": {"band": 0.6}}, encoding=encoding
    )


def residuals_along(residuals: Sequence[Row]) -> Spec:
    """Returns residual norms over gradient norms along the run."""
    names = {"median": "median layer", "largest": "largest"}
    rows = [
        {"step": point["step"], "name": name, "value": point[key]}
        for point in residuals
        for key, name in names.items()
    ]
    return _lines(rows, "residual / gradient", list(names.values()))


def compared(runs: Sequence[tuple[str, dict[str, Any]]], key: str, title: str) -> Spec:
    """Returns the course of two runs over each other: of ``seconds`` or ``exposed``, in ms, or of ``sent_bytes``."""
    parts = {"seconds": slice(None), "exposed": slice(2, None)}
    rows = [
        {
            "step": point["step"],
            "name": name,
            "value": point[key] if key not in parts else 1e3 * sum(point["parts"][parts[key]]),
        }
        for name, summary in runs
        if summary["steps"] is not None
        for point in summary["steps"]["along"]
    ]
    return _lines(rows, title, [name for name, _ in runs])
