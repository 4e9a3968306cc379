"""Figures without a display, in one style: creates them, styles their lines, and writes them to files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gradcomp.core.errors import ConfigError

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
