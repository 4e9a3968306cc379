"""Figures without a display, in one style: the profile of a plan, and the information plane.

The profile shows levels by layer, in front of the layers' sizes (Markov et al. 2024, Figure 1). The information plane
is drawn over steps and over layers (Abrahamyan et al. 2021, Figures 3, 4 and 12).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from gradcomp.contrib.information_plane import Plane
from gradcomp.core.errors import ConfigError
from gradcomp.core.journal import Logged, Run
from gradcomp.core.plan import EXACT, Assignment, level_kind, level_number, names, readable

#: Okabe and Ito's colours, which people with colour vision deficiency can tell apart; the palest two are left out.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")

#: Colour of baselines: no compression, a uniform plan, a shuffled pair.
REFERENCE_COLOUR = "#444444"

_MARKERS = "osD^vP"
_DASHES = ("-", "--", ":", "-.")

_STYLE = {
    "figure.constrained_layout.use": True,
    "figure.dpi": 120,
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": "#e3e3e3",
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.3,
    "lines.markersize": 4,
    "legend.frameon": False,
    "legend.fontsize": 8,
}

PLAIN_COLOUR = "#555555"
SIZE_COLOUR = "#cfd8e4"
#: Levels that differ by more than this factor are drawn on a logarithmic axis.
LINEAR_FACTOR = 20
#: Largest number of layers that have single marks, which would overlap beyond it.
MARKED_LAYERS = 200
#: Largest number of layers that are named below the figure; more are numbered.
NAMED_LAYERS = 60
#: Longest name of a layer, and in the legend.
NAME_LETTERS = 40
Rows = Sequence[Assignment]
Legend = dict[str, Any]  # label -> the artist of matplotlib that it names
ENTROPY_COLOUR = "#777777"
#: Number of layers that are drawn over steps.
_SHOWN_LAYERS = 4
#: Longest title, and name in the legend, of the information plane.
_LEGEND_LETTERS = 32


@contextmanager
def drawing(
    path: str | os.PathLike[str], width: float, height: float, note: str | None = None
) -> Iterator[Any]:
    """Yields an empty figure of this size in inches, and writes it as PNG at the end; ``note`` goes into its metadata.

    Raises ConfigError without matplotlib, with the command that installs it, and if the file cannot be written.
    """
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(f"a figure needs matplotlib: pip install 'gradcomp[plot]' ({error})") from error
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(width, height))
        FigureCanvasAgg(figure)
        yield figure
        try:
            figure.savefig(path, format="png", metadata={"Description": note} if note else None)
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error


def look(number: int, marked: bool = True) -> dict[str, Any]:
    """Returns colour, dashes and marker of the line with this number; the first 24 lines all look different."""
    colour = number % len(COLOURS)
    style = {"color": COLOURS[colour], "linestyle": _DASHES[number // len(COLOURS) % len(_DASHES)]}
    return {**style, "marker": _MARKERS[colour]} if marked else style


def whole_numbers(axis: Any) -> None:
    """Puts the ticks of an axis at whole numbers."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def draw_profile(run: Run, shown: Logged, path: str | os.PathLike[str]) -> None:
    """Writes the profile of a plan as PNG.

    It has one panel for each kind of level (bits, rank, density), in which every compressor has its colour; the run's
    first plan, often the uniform one, is a dashed grey line. Up to 60 layers are named, more are numbered. Raises
    ConfigError without matplotlib, or if the file cannot be written.
    """
    rows = _rows(run, shown)
    kinds = sorted({_kind(a) for a in rows} - {""}) or [""]
    labels = _labels(run)
    letters = max(map(len, labels), default=0)
    with drawing(path, 10, 1.8 + 3.2 * len(kinds) + 0.075 * letters) as figure:
        panels = figure.subplots(len(kinds), 1, sharex=True, squeeze=False)[:, 0]
        legend: Legend = {}
        for panel, kind in zip(panels, kinds, strict=True):
            _draw_first(panel, run, rows, kind, legend)
            _draw_levels(panel, rows, kind, legend)
            _draw_without(panel, rows, legend)
            _draw_sizes(panel, run, legend)
            _scale(panel, kind, len(rows))
        if labels:
            panels[-1].set_xticks(range(1, len(labels) + 1), labels, rotation=90, fontsize=7)
        panels[-1].set_xlabel("layer" if labels else "number of the layer")
        figure.suptitle(_title(run, shown))
        figure.legend(legend.values(), legend.keys(), loc="outside lower center", ncols=3)


def _labels(run: Run) -> list[str]:
    """Returns the layers' names, or none if there are too many to fit."""
    return [_text(layer.name) for layer in run.layers] if len(run.layers) <= NAMED_LAYERS else []


def _rows(run: Run, logged: Logged) -> Rows:
    return [logged.plan.by_layer[layer.name] for layer in run.layers]


def _kind(a: Assignment) -> str:
    """Returns the kind of a level, for the axis; empty for a layer without a level."""
    return "" if a.level is None else level_kind(a.compressor) or "level"


def _points(rows: Rows, kind: str, family: str | None = None) -> list[tuple[int, float]]:
    """Returns the layers' numbers and levels of this kind, of one compressor or of all."""
    numbered = [(number, a) for number, a in enumerate(rows, 1) if family in (None, a.compressor)]
    return [(number, level_number(a.level)) for number, a in numbered if _kind(a) == kind]


def _draw_first(panel: Any, run: Run, rows: Rows, kind: str, legend: Legend) -> None:
    """Draws the run's first plan, unless it is the one that is shown."""
    first = _rows(run, run.plans[0])
    if kind and first != rows and any(_kind(a) == kind for a in first):
        points = _points(first, kind)
        label = f"plan {run.plans[0].plan.version}, from step {run.plans[0].step}"
        lines = panel.step(*zip(*points, strict=True), where="mid", color=REFERENCE_COLOUR, linestyle="--")
        legend.setdefault(label, lines[0])


def _draw_levels(panel: Any, rows: Rows, kind: str, legend: Legend) -> None:
    """Draws a line for each compressor with this kind of level, from one of its layers to the next."""
    named = names(a.compressor for a in rows)
    single = len(rows) <= MARKED_LAYERS
    style = {"markersize": 4, "linewidth": 1.2} if single else {"markersize": 2, "linewidth": 0.6}
    for i, family in enumerate(sorted({a.compressor for a in rows if a.level is not None})):
        if points := _points(rows, kind, family):
            lines = panel.step(*zip(*points, strict=True), where="mid", **look(i) | style)
            legend[_entry(named[family], len(points))] = lines[0]


def _draw_without(panel: Any, rows: Rows, legend: Legend) -> None:
    """Marks layers without a level along the lower edge; exact layers have another mark."""
    named = names(a.compressor for a in rows)
    for name, mark in ((EXACT, "x"), ("without a level", "|")):
        here = [
            number
            for number, a in enumerate(rows, 1)
            if a.level is None and (named[a.compressor] == EXACT) == (name == EXACT)
        ]
        if here:
            style = {"color": PLAIN_COLOUR, "linestyle": "none", "marker": mark, "markersize": 5}
            lines = panel.plot(here, [0.03] * len(here), transform=panel.get_xaxis_transform(), **style)
            legend.setdefault(_entry(name, len(here)), lines[0])


def _draw_sizes(panel: Any, run: Run, legend: Legend) -> None:
    """Draws the layers' sizes as bars on their own axis, behind the levels."""
    elements = [max(layer.size, 0.5) for layer in run.layers]  # an empty layer's bar ends at the lower edge
    behind = panel.twinx()
    behind.grid(False)
    width = 0.9 if len(elements) <= MARKED_LAYERS else 1.0
    bars = behind.bar(range(1, len(elements) + 1), elements, width=width, color=SIZE_COLOUR)
    behind.set_yscale("log")
    behind.set_ylim(max(min(elements, default=1), 1) / 2, max(elements, default=1) * 2)
    behind.set_ylabel("elements")
    legend.setdefault("elements (right axis)", bars)
    panel.set_zorder(behind.get_zorder() + 1)
    panel.patch.set_visible(False)


def _scale(panel: Any, kind: str, layers: int) -> None:
    """Scales the axes to the drawn levels: from zero, or logarithmic if they differ by a large factor."""
    panel.set_xlim(0.5, max(layers, 1) + 0.5)
    whole_numbers(panel.xaxis)
    if not kind:
        panel.yaxis.set_visible(False)
        return
    panel.set_ylabel(f"level ({kind})" if kind != "level" else kind)
    lines = [line for line in panel.lines if line.get_transform() == panel.transData]
    levels = [float(level) for line in lines for level in line.get_ydata()]
    low, high = min(levels), max(levels)
    if low > 0 and high / low > LINEAR_FACTOR:
        panel.set_yscale("log")
        panel.set_ylim(low / 2, high * 1.5)
    else:
        panel.set_ylim(min(0.0, 1.15 * low), 1.15 * high if high > 0 else 1.0)
        if kind in ("bits", "rank"):
            whole_numbers(panel.yaxis)


def _title(run: Run, shown: Logged) -> str:
    title = f"Plan {shown.plan.version}, from step {shown.step}"
    predicted, measured = run.ratio(shown.predicted_bytes), run.ratio(shown.measured_bytes or 0)
    if predicted is not None:
        title += f": {predicted:.2f}x fewer bytes than uncompressed"
    if measured is not None:
        title += f", {measured:.2f}x measured"
    return title


def _entry(name: str, layers: int) -> str:
    return f"{_text(name)}, {layers} layer{'s' * (layers != 1)}"


def _text(name: str, letters: int = NAME_LETTERS, begin: bool = True) -> str:
    """Returns the beginning or the end of a name, on one line.

    Names come from a file, and an unescaped dollar would begin a formula.
    """
    if len(name) > letters:
        name = name[: letters - 1] + "…" if begin else "…" + name[1 - letters :]
    return readable(name).replace("$", r"\$")


def draw_information(
    planes: Sequence[Plane], path: str | os.PathLike[str], titles: Sequence[str] | None = None
) -> None:
    """Writes a PNG with two panels for each plane.

    The left one shows, over steps and for up to four layers, I(g_1; g_2) as a solid line, H(g_2) dotted and shuffled
    pairs dashed (Figures 3 and 12). The right one shows, over layers, the means over steps (Figure 4). Raises
    ConfigError without matplotlib, or if the file cannot be written.
    """
    if not planes or (titles is not None and len(titles) != len(planes)):
        raise ConfigError("a figure needs at least one plane, and a title for each plane or for none")
    names = titles or [f"ranks {plane.pair[0]} and {plane.pair[1]}" for plane in planes]
    with drawing(path, 12, 3.6 * len(planes)) as figure:
        rows = figure.subplots(len(planes), 2, squeeze=False)
        for (left, right), plane, name in zip(rows, planes, names, strict=True):
            _over_steps(left, plane)
            _over_layers(right, plane)
            for panel in (left, right):
                panel.set_title(_text(name, _LEGEND_LETTERS, begin=False))
                panel.set_ylabel("bits per element")
                panel.set_ylim(bottom=min(0.0, panel.get_ylim()[0]))
                panel.legend(loc="upper left", bbox_to_anchor=(1, 1))


def _over_steps(panel: Any, plane: Plane) -> None:
    places = np.unique(np.linspace(0, len(plane.layers) - 1, _SHOWN_LAYERS).round().astype(int)).tolist()
    marker = "." if len(plane.steps) < 50 else ""
    whole_numbers(panel.xaxis)
    for colour, place in zip(COLOURS, places, strict=False):
        name = _text(plane.layers[place].name, _LEGEND_LETTERS, begin=False)
        shuffled = "shuffled" if place == places[-1] else None
        for values, style, shade, width, label in (
            (plane.mutual, "-", colour, 1.4, name),
            (plane.entropy, ":", colour, 1.4, None),
            (plane.null, "--", REFERENCE_COLOUR, 0.8, shuffled),
        ):
            look_of_line = {"color": shade, "linewidth": width, "marker": marker, "label": label}
            panel.plot(plane.steps, values[place], style, **look_of_line)
    panel.plot([], [], ":", color=ENTROPY_COLOUR, label="entropy")
    panel.set_xlabel("step")


def _over_layers(panel: Any, plane: Plane) -> None:
    numbers = np.arange(1, len(plane.layers) + 1)
    for values, style, colour, label in (
        (plane.entropy, ":", ENTROPY_COLOUR, "entropy"),
        (plane.mutual, "-", COLOURS[0], "mutual information"),
        (plane.null, "--", REFERENCE_COLOUR, "shuffled"),
        (plane.gaussian, "-.", COLOURS[1], "Gaussian, exact"),
    ):
        panel.plot(numbers, plane.mean(values), style, color=colour, marker="o", markersize=3, label=label)
    panel.set_xlabel("number of the layer")
    panel.set_xlim(0.5, len(numbers) + 0.5)
    whole_numbers(panel.xaxis)
