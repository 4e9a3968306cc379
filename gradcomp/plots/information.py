"""Draws the information plane over steps and over layers (Abrahamyan et al. 2021, Figures 3, 4 and 12)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gradcomp.analysis import Plane
from gradcomp.core.errors import ConfigError
from gradcomp.core.text import printable
from gradcomp.plots.canvas import COLOURS, REFERENCE_COLOUR, drawing, whole_numbers

ENTROPY_COLOUR = "#777777"

#: Number of layers that are drawn over steps.
_SHOWN_LAYERS = 4

#: Longest name in a legend.
_NAME_LETTERS = 32


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
                panel.set_title(_text(name))
                panel.set_ylabel("bits per element")
                panel.set_ylim(bottom=min(0.0, panel.get_ylim()[0]))
                panel.legend(loc="upper left", bbox_to_anchor=(1, 1))


def _over_steps(panel: Any, plane: Plane) -> None:
    places = np.unique(np.linspace(0, len(plane.layers) - 1, _SHOWN_LAYERS).round().astype(int)).tolist()
    marker = "." if len(plane.steps) < 50 else ""
    whole_numbers(panel.xaxis)
    for colour, place in zip(COLOURS, places, strict=False):
        lines: tuple[tuple[npt.NDArray[np.float64], str, str, str], ...] = (
            (plane.mutual, "-", colour, _text(plane.layers[place].name)),
            (plane.entropy, ":", colour, ""),
            (plane.null, "--", REFERENCE_COLOUR, "shuffled" if place == places[-1] else ""),
        )
        for values, style, shade, label in lines:
            width = 0.8 if shade == REFERENCE_COLOUR else 1.4
            panel.plot(
                plane.steps,
                values[place],
                style,
                color=shade,
                linewidth=width,
                marker=marker,
                label=label or None,
            )
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


def _text(name: str) -> str:
    """Returns a name on one line, with dollars escaped, since they would begin a formula."""
    short = name if len(name) <= _NAME_LETTERS else "…" + name[1 - _NAME_LETTERS :]
    return printable(short).replace("$", r"\$")
