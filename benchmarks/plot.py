"""Line charts as plain SVG: logarithmic axes, a legend, nothing else. The same numbers give the same bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b", "#17becf", "#7f7f7f")
WIDTH, HEIGHT = 460, 330  # of a panel
LEFT, RIGHT, TOP, BOTTOM = 62, 130, 34, 44

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Panel:
    """One chart: lines by name, in the order of the legend. Both axes are logarithmic."""

    title: str
    x_label: str
    y_label: str
    lines: Mapping[str, Points]
    x_ticks: Mapping[float, str]


def document(panels: Sequence[Panel], columns: int = 2) -> str:
    """All panels, row by row."""
    rows = -(-len(panels) // columns)
    width, height = columns * WIDTH, rows * HEIGHT
    names = list(dict.fromkeys(name for panel in panels for name in panel.lines))
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}
    view = f'viewBox="0 0 {width} {height}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {view} font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for i, panel in enumerate(panels):
        parts.append(f'<g transform="translate({i % columns * WIDTH},{i // columns * HEIGHT})">')
        parts += _panel(panel, colours)
        parts.append("</g>")
    return "\n".join([*parts, "</svg>", ""])


def _panel(panel: Panel, colours: Mapping[str, str]) -> list[str]:
    values = [point for line in panel.lines.values() for point in line]
    x_low, x_high = min(x for x, _ in values), max(x for x, _ in values)
    y_low = 10 ** math.floor(math.log10(min(y for _, y in values)))
    y_high = 10 ** math.ceil(math.log10(max(y for _, y in values)))
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM

    def at_x(x: float) -> float:
        return LEFT + (right - LEFT) * math.log(x / x_low) / math.log(x_high / x_low)

    def at_y(y: float) -> float:
        return bottom - (bottom - TOP) * math.log(y / y_low) / math.log(y_high / y_low)

    parts = [f'<text x="{LEFT}" y="18" font-size="13">{escape(panel.title)}</text>']
    for x, label in panel.x_ticks.items():
        parts += [
            _line(at_x(x), TOP, at_x(x), bottom, "#dddddd"),
            _text(at_x(x), bottom + 15, label, "middle"),
        ]
    for power in range(round(math.log10(y_low)), round(math.log10(y_high)) + 1):
        y = 10.0**power
        parts += [
            _line(LEFT, at_y(y), right, at_y(y), "#dddddd"),
            _text(LEFT - 5, at_y(y) + 4, f"{y:g}", "end"),
        ]
    upright = f"translate(14,{(TOP + bottom) / 2:.1f}) rotate(-90)"
    parts += [
        _text((LEFT + right) / 2, HEIGHT - 10, panel.x_label, "middle"),
        f'<text transform="{upright}" text-anchor="middle">{escape(panel.y_label)}</text>',
    ]
    for i, (name, line) in enumerate(panel.lines.items()):
        points = " ".join(f"{at_x(x):.1f},{at_y(y):.1f}" for x, y in line)
        y = TOP + 8 + 16 * i
        parts += [
            f'<polyline points="{points}" fill="none" stroke="{colours[name]}" stroke-width="1.6"/>',
            _line(right + 8, y, right + 24, y, colours[name], 2),
            _text(right + 28, y + 4, name, "start"),
        ]
    return parts


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, width: int = 1) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" stroke-width="{width}"/>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
