"""Figures without a display: how they begin, and how they become files."""

from __future__ import annotations

import os
from typing import Any

from gradcomp.core.errors import ConfigError


def canvas(width: float, height: float) -> Any:
    """An empty figure of so many inches; ConfigError, naming what to install, without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(f"a figure needs matplotlib: pip install 'gradcomp[plot]' ({error})") from error
    figure = Figure(figsize=(width, height), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save(figure: Any, path: str | os.PathLike[str]) -> None:
    """Write it as PNG; ConfigError if that is not possible."""
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error
