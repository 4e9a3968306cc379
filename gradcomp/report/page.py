"""The page of a report: headings, tables and places for charts, in one file that loads nothing."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from gradcomp.core.errors import need
from gradcomp.core.plan import EXACT, readable
from gradcomp.report import charts
from gradcomp.report.charts import MOST_LAYERS, MOST_PLANS, MOST_RANKS, Spec
from gradcomp.report.summary import PARTS, Row, milliseconds

#: A page that loads anything would be a defect: the browser refuses it. Vega makes functions of its expressions.
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; img-src data:"
)
#: Reasons and skipped steps that are listed; the others are counted.
_MOST_SHOWN = 30


class _Page:
    """Collects the parts of a page; all text is escaped where it is added."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.charts: dict[str, Spec] = {}

    def heading(self, title: str, level: int = 2) -> None:
        self.parts.append(f"<h{level}>{_text(title)}</h{level}>")

    def say(self, text: str, kind: str = "") -> None:
        about = f' class="{kind}"' if kind else ""
        self.parts.append(f"<p{about}>{_text(text)}</p>")

    def chart(self, name: str, spec: Spec, caption: str) -> None:
        self.charts[name] = spec
        self.parts.append(
            f'<figure><div class="chart" id="{name}"></div><figcaption>{_text(caption)}</figcaption></figure>'
        )

    def pair(self, *specs: tuple[str, Spec, str]) -> None:
        """Adds charts that stand side by side where the page is wide enough."""
        self.parts.append('<div class="pair">')
        for one in specs:
            self.chart(*one)
        self.parts.append("</div>")

    def table(self, heads: Sequence[str], rows: Iterable[Sequence[Any]], kind: str = "") -> None:
        """Adds a table. A cell is text, a number as (text, value), or (colour, text, None) with a swatch."""
        made = [[_cell(value) for value in row] for row in rows]
        numeric = [all(row[k].startswith('<td class="number"') for row in made) for k in range(len(heads))]
        titles = [f"<button>{_text(head)}</button>" if kind == "sortable" else _text(head) for head in heads]
        head = "".join(
            f'<th scope="col"{" class=number" if is_number else ""}>{title}</th>'
            for title, is_number in zip(titles, numeric, strict=True)
        )
        body = "\n".join(f"<tr>{''.join(row)}</tr>" for row in made)
        self.parts.append(
            f'<div class="wide" tabindex="0"><table class="{kind}"><thead><tr>{head}</tr></thead>'
            f"<tbody>{body}</tbody></table></div>"
        )


def _text(text: str) -> str:
    return escape(readable(text))


def _cell(value: Any) -> str:
    match value:
        case (str(text), None):
            return f'<td class="number">{_text(text)}</td>'
        case (str(text), int() | float() as number):
            return f'<td class="number" data-value="{number:.9g}">{_text(text)}</td>'
        case (str(colour), str(text), None):
            return f'<td><span class="swatch" style="background:{escape(colour)}"></span>{_text(text)}</td>'
    return f'<td class="name">{_text(str(value))}</td>'


def _number(value: float | None, form: str = ",.0f") -> tuple[str, float | None]:
    return ("-", None) if value is None else (format(value, form), value)


def _time(seconds: float) -> tuple[str, float]:
    return milliseconds(seconds), seconds


def render(summary: dict[str, Any], title: str, other: tuple[str, dict[str, Any]] | None = None) -> str:
    """Returns the page of one run, compared with an ``other`` one if that is given with its title.

    Raises ModuleNotFoundError, which names the extra, if the library that draws is not installed.
    """
    need("the report", "report", "vl_convert")
    import vl_convert

    page = _Page()
    _head(page, summary, title)
    if other is not None:
        _comparison(page, (title, summary), other)
    for section in (_steps, _ranks, _layers, _levels, _gains, _residuals, _skipped):
        section(page, summary)
    folder = files("gradcomp.report")
    style, script = (folder.joinpath(name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    bundle: Any = vl_convert.javascript_bundle  # without an argument it returns all; its stub asks for one
    library = bundle().replace("</script", "<\\/script").replace("<!--", "<\\!--")
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n<link rel="icon" href="data:,">',
            f"<title>{_text(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main>",
            *page.parts,
            f'</main>\n<script type="application/json" id="charts">{_json(page.charts)}</script>',
            f"<script>(() => {{{library}}})();</script>\n<script>{script}</script>\n</body>\n</html>\n",
        ]
    )


def _json(value: Any) -> str:
    """Returns JSON for a script element, which no text in it can end."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


# -- sections, in order --------------------------------------------------------------------------------------------


def _head(page: _Page, summary: dict[str, Any], title: str) -> None:
    run = summary["run"]
    page.heading(title, 1)
    page.say(summary["verdict"], "verdict")
    facts = [
        f"{run['ranks']} ranks",
        f"{run['layers']} layers with {run['elements']:,} elements",
        f"compression {run['compression']}",
        f"controller {run['controller'] or 'none'}",
        f"gradcomp {run['version']}",
    ]
    page.say("; ".join(facts) + ".", "soft")


def _steps(page: _Page, summary: dict[str, Any]) -> None:
    page.heading("Where a step's time goes")
    steps = summary["steps"]
    if steps is None or not steps["along"]:
        page.say(
            "The log has no times of steps: GRADCOMP_RUN_LOG_EVERY_STEPS is 0, or the run was too short."
        )
        return
    page.chart(
        "parts", charts.parts_along(summary), "The parts of a step along the run, as means over ranks."
    )
    rows: list[Sequence[Any]] = [
        [(charts.OF_PART[part], part, None), _time(seconds), _share(seconds, steps["seconds"])]
        for part, seconds in steps["parts"].items()
    ]
    rows.append(["a step", _time(steps["seconds"]), _share(steps["seconds"], steps["seconds"])])
    page.table(["part", "time a step", "share"], rows)
    page.say(
        f"Behind these, on gradcomp's own thread: kernels {milliseconds(steps['codec'])} a step, and rounds of "
        f"messages {milliseconds(steps['wire'])}, summed over exchange buckets that are under way together. A rank "
        f"sends {steps['sent_bytes'] / 1e6:,.3f} MB a step. Times are those of a usual step: the slowest and the "
        "fastest quarter of the windows are left out.",
        "soft",
    )


def _share(part: float, whole: float) -> tuple[str, float | None]:
    return _number(part / whole if whole else None, ".0%")


def _ranks(page: _Page, summary: dict[str, Any]) -> None:
    page.heading("Who is waited for")
    ranks = summary["ranks"]
    if not ranks:
        page.say("The log has no times of several ranks.")
        return
    page.pair(
        ("last", charts.last_by_rank(ranks), "Share of the steps in which the others waited for a rank."),
        ("last-along", charts.last_along(ranks), "When: the darker, the more of the steps."),
    )
    heads = ["rank", "works", "exposed", "waits for the last", "was last", "bytes a step"]
    rows = [
        [
            (str(row["rank"]), row["rank"]),
            _time(row["worked"]),
            _time(row["exposed"]),
            _time(row["waited"]),
            _number(row["last_share"], ".1%"),
            _number(row["sent_bytes"]),
        ]
        for row in sorted(ranks, key=lambda row: -row["last_share"])[:MOST_RANKS]
    ]
    page.table(heads, rows, "sortable")
    _say_rest(page, len(ranks) - MOST_RANKS, "ranks")


def _say_rest(page: _Page, rest: int, what: str) -> None:
    if rest > 0:
        page.say(f"{rest} more {what} are not shown; --json has all of them.", "soft")


def _layers(page: _Page, summary: dict[str, Any]) -> None:
    page.heading("Bytes and error by layer")
    layers = summary["layers"]
    if not layers:
        page.say("The log has no plan.")
        return
    shown, rest = layers[:MOST_LAYERS], layers[MOST_LAYERS:]
    if layers[0]["bytes"] is not None:
        caption = "Bytes that one rank sends a step under the last plan, by formula, before an uncompressed exchange."
        page.chart("bytes", charts.bytes_by_layer(layers), caption)
    if any(row["error"] or row["period_error"] for row in shown if row["compressor"] != EXACT):
        caption = "What compression left out of a gradient on rank 0, in the last sample of a layer."
        page.chart("errors", charts.errors_by_layer(layers), caption)
    else:
        page.say("The log has no measured error: no layer was sampled, or every layer travels exactly.")
    heads = [
        "layer",
        "elements",
        "compressor",
        "level",
        "uncompressed",
        "sent",
        "error",
        "by controller",
        "residual",
    ]
    rows = [
        [
            row["name"],
            _number(row["elements"]),
            row["compressor"],
            row["level"],
            _number(row["dense_bytes"]),
            _number(row["bytes"]),
            _number(row["error"], ".3g"),
            _number(row["period_error"], ".3g"),
            _number(
                row["residual"] / row["norm"] if row["residual"] is not None and row["norm"] else None, ".3g"
            ),
        ]
        for row in shown
    ]
    if rest:
        sums = [sum(row[key] or 0 for row in rest) for key in ("elements", "dense_bytes", "bytes")]
        blank: tuple[str, None] = ("", None)
        name = f"{len(rest)} more layers"
        rows.append([name, _number(sums[0]), "", "", *map(_number, sums[1:]), blank, blank, blank])
    page.table(heads, rows, "sortable")
    page.say(
        "Sent and uncompressed: bytes of one rank in a step. Error: relative, with the residual; by controller: over a "
        "period. Residual: its norm over the gradient's.",
        "soft",
    )


def _levels(page: _Page, summary: dict[str, Any]) -> None:
    page.heading("Levels, and why they changed")
    plans, steps = summary["plans"], summary["steps"]
    if not plans:
        page.say("The log has no plan.")
        return
    if len(plans) == 1:
        why = (
            "its controller made no change" if summary["run"]["controller"] else "this run has no controller"
        )
        page.say(f"The plan did not change: {why}. Layers by level: {plans[0]['layers']}.")
        return
    if len({tuple(plan["level_by_layer"]) for plan in plans}) > 1:
        end = steps["first"] + steps["steps"] if steps is not None else plans[-1]["step"] + 1
        page.chart("levels", charts.levels_along(plans, end), "Elements by level along the run.")
        shown = [row["name"] for row in summary["layers"] if row["compressor"] != EXACT][:MOST_LAYERS]
        spec = charts.levels_by_layer(plans, summary["layer_names"], shown, end)
        page.chart("layer-levels", spec, "Levels of the layers that send most.")
    else:
        page.say("Every logged plan gives each layer the same level.")
    heads = ["step", "plan", "predicted", "measured", "ratio", "layers by level", "why"]
    rows = [
        [
            _number(plan["step"]),
            _number(plan["version"]),
            _number(plan["predicted_bytes"]),
            _number(plan["measured_bytes"]),
            _number(plan["ratio"], ".2f"),
            plan["layers"],
            plan["reason"] or "-",
        ]
        for plan in plans[-_MOST_SHOWN:]
    ]
    page.table(heads, rows)
    if len(plans) > _MOST_SHOWN:
        page.say(f"{len(plans) - _MOST_SHOWN} earlier plans are not listed; --json has all of them.", "soft")
    if len(plans) > MOST_PLANS:
        page.say(f"The charts show one plan of every {-(-len(plans) // MOST_PLANS)}.", "soft")


def _gains(page: _Page, summary: dict[str, Any]) -> None:
    page.heading("Gains of GraVAC")
    gains = summary["gains"]
    if gains is None:
        page.say("This run has no gains: its controller is not GraVAC.")
        return
    if gains["rows"] > 1:
        page.say(
            f"Gains and throughputs are medians over {gains['rows']} layers, norms and steps their sums.",
            "soft",
        )
    before = (
        "Gradients before and after compression, summed over ranks and layers (Tyagi and Swany 2023, Figures 4 to 6, a "
        "and b)."
    )
    by_factor = f"Gain by factor (Figures 4d to 6d). A factor is sent while its gain is at least {gains['epsilon']:g}."
    page.pair(("norms", charts.norms_along(gains), before), ("gains", charts.gains_along(gains), by_factor))
    caption = "The factors of a step: the candidate is sent if its gain allows it, else the minimum, else all values."
    page.chart("factors", charts.factors_along(gains), caption)
    sent = charts.by_factor(gains, "steps", "steps"), "Steps that sent each factor (Figures 7b to 9b)."
    if all(row["throughput"] is None for row in gains["factors"]):
        page.chart("density", *sent)
        page.say("No throughput is known yet: it is measured in windows of steps.")
        return
    speed = charts.by_factor(gains, "throughput", "gain x ranks / second")
    page.pair(
        ("density", *sent), ("throughput", speed, "Compression throughput by factor (Figures 7c to 9c).")
    )


def _residuals(page: _Page, summary: dict[str, Any]) -> None:
    page.heading("Residuals")
    if not summary["residuals"]:
        page.say("The log has no residual: no sampled layer travels with error feedback.")
        return
    caption = "Norm of the residual over that of the gradient, of the layers that were sampled on rank 0."
    page.chart("residuals", charts.residuals_along(summary["residuals"]), caption)


def _skipped(page: _Page, summary: dict[str, Any]) -> None:
    page.heading("Skipped steps")
    skipped, discarded = summary["skipped"], summary["discarded"]
    if summary["steps"] is None:
        page.say("The log says nothing of skipped steps.")
        return
    if not skipped and not discarded:
        page.say("No step was skipped.")
    if discarded:
        page.say(f"{discarded:,} exchanges were thrown away, without a step.")
    if skipped:
        page.say(f"{len(skipped):,} of {summary['steps']['steps']:,} steps were skipped.")
        rows = _ranges(skipped)
        page.table(["steps", "why"], rows[:_MOST_SHOWN])
        _say_rest(page, len(rows) - _MOST_SHOWN, "rows")


def _ranges(skipped: Sequence[Row]) -> list[tuple[str, str]]:
    """Returns skipped steps with their reasons; a row for steps that follow one another for the same reason."""
    found: list[list[Any]] = []
    for row in skipped:
        layer = row["layer"]
        why = "the ranks agreed to skip it" if layer is None else f"{layer} was not finite"
        if found and found[-1][1:] == [row["step"] - 1, why]:
            found[-1][1] = row["step"]
        else:
            found.append([row["step"], row["step"], why])
    return [(f"{a:,}" if a == b else f"{a:,} to {b:,}", why) for a, b, why in found]


def _comparison(page: _Page, first: tuple[str, dict[str, Any]], second: tuple[str, dict[str, Any]]) -> None:
    page.heading("Two runs")
    runs = first, second
    if any(summary["steps"] is None for _, summary in runs):
        page.say("One of the runs has no times of steps.")
        return
    rows: list[Sequence[Any]] = []

    def add(name: str, values: Sequence[float | None], show: Any) -> None:
        known = [value for value in values if value is not None]
        ratio = known[1] / known[0] if len(known) == 2 and known[0] else None
        shown = [("-", None) if value is None else show(value) for value in values]
        rows.append([name, *shown, _number(ratio, ".2f")])

    add("a step", [summary["steps"]["seconds"] for _, summary in runs], _time)
    for part in PARTS:
        add(part, [summary["steps"]["parts"][part] for _, summary in runs], _time)
    for name, key in (("kernels", "codec"), ("rounds of messages", "wire")):
        add(name, [summary["steps"][key] for _, summary in runs], _time)
    add("bytes a step", [summary["steps"]["sent_bytes"] for _, summary in runs], _number)
    add("skipped steps", [float(len(summary["skipped"])) for _, summary in runs], _number)
    page.table(["", *(name for name, _ in runs), "ratio"], rows)
    page.pair(
        ("both-seconds", charts.compared(runs, "seconds", "ms a step"), "A step."),
        ("both-exposed", charts.compared(runs, "exposed", "ms a step"), "Exposed communication in a step."),
        (
            "both-bytes",
            charts.compared(runs, "sent_bytes", "bytes a step"),
            "Bytes that a rank sends in a step.",
        ),
    )
