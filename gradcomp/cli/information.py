"""``gradcomp mi run.npz`` prints the information plane of recorded gradients; ``--png`` draws it."""

from __future__ import annotations

from typing import Any, get_args

import click
import numpy as np
from rich.table import Table

from gradcomp.analysis import Plane, information_plane
from gradcomp.analysis import read as read_recording
from gradcomp.cli.output import json_option, print_json, show, table
from gradcomp.contrib.information import Binning, Correction
from gradcomp.core.plan import readable


@click.command()
@click.argument("file", type=click.Path())
@click.option(
    "--pair", "pairs", type=(int, int), multiple=True, metavar="A B", help="Ranks; default: 0 and 1; several."
)
@click.option(
    "--layer", "layers", multiple=True, metavar="PATTERN", help="Layers by shell pattern; default: all."
)
@click.option(
    "--bins", type=int, metavar="N", help="Bins of each histogram; default: 2 m^(1/3) for m elements."
)
@click.option("--binning", type=click.Choice(get_args(Binning)), default="uniform", help="Default: uniform.")
@click.option("--correction", type=click.Choice(get_args(Correction)), default="none", help="Default: none.")
@click.option("--shuffles", type=int, default=4, metavar="N", help="Permutations of the null; default: 4.")
@click.option("--png", metavar="OUT", help="Draw bits over steps and over layers.")
@json_option
def command(
    file: str,
    pairs: tuple[tuple[int, int], ...],
    layers: tuple[str, ...],
    png: str | None,
    as_json: bool,
    **settings: Any,
) -> None:
    """Print the information that the gradients of two ranks share.

    FILE is the recording: what record_gradients() wrote.
    """
    recording = read_recording(file)
    pairs = pairs or ((0, 1),)
    planes = [information_plane(recording, pair, layers=list(layers) or None, **settings) for pair in pairs]
    if png is not None:
        from gradcomp.plots import draw_information  # which needs an extra

        draw_information(planes, png)
    if as_json:
        print_json(
            {
                "steps": [int(step) for step in recording.steps],
                "planes": [_as_json(plane) for plane in planes],
            }
        )
        return
    steps, bins = recording.steps, settings["bins"] or "2 m^(1/3)"
    facts = {
        "recorded": f"{len(steps)} steps, {steps[0]} to {steps[-1]}, by gradcomp {recording.version}",
        "ranks": str(recording.ranks),
        "histogram": f"{settings['binning']}, {bins} bins, correction {settings['correction']}",
    }
    parts: list[str | Table] = ["\n".join(f"{fact:<11}{readable(text)}" for fact, text in facts.items())]
    for plane in planes:
        first, second = plane.pair
        parts += [f"ranks {first} and {second}: bits per element, means over steps", _table(plane)]
        mutual, null = plane.share(plane.mutual), plane.share(plane.null)
        beside = "" if np.isnan(null) else f", and of shuffled pairs {null:.1%}"
        parts.append(f"mutual information is {mutual:.1%} of the entropy{beside}")
    if png is not None:
        parts.append(f"figure: {readable(png)}")
    show(*parts)


def _columns(plane: Plane) -> dict[str, Any]:
    bits = {
        "entropy": plane.entropy,
        "conditional": plane.conditional,
        "mutual": plane.mutual,
        "shuffled": plane.null,
        "excess": plane.mutual - plane.null,
        "gaussian": plane.gaussian,
    }
    return {name: plane.mean(one) for name, one in bits.items()} | {"estimated": plane.calibration}


def _table(plane: Plane) -> Table:
    heads = [
        "#",
        "layer",
        "elements",
        "of",
        "H",
        "H(b|a)",
        "I",
        "shuffled",
        "excess",
        "I/H",
        "Gaussian",
        "estimated",
    ]
    columns = _columns(plane)
    rows = []
    for i, layer in enumerate(plane.layers):
        bits = {name: float(column[i]) for name, column in columns.items()}
        shared = f"{bits['mutual'] / bits['entropy']:.1%}" if bits["entropy"] > 0 else "-"
        texts = ["-" if np.isnan(value) else f"{value:.3f}" for value in bits.values()]
        sizes = f"{plane.elements[i]:,}", f"{layer.size:,}"
        rows.append([str(i + 1), layer.name, *sizes, *texts[:5], shared, *texts[5:]])
    return table(heads, rows, left={1})


def _as_json(plane: Plane) -> dict[str, Any]:
    columns = _columns(plane)
    layers = [
        {"name": layer.name, "size": layer.size, "elements": int(plane.elements[i])}
        | {name: float(column[i]) for name, column in columns.items()}
        for i, layer in enumerate(plane.layers)
    ]
    return {"pair": list(plane.pair), "share": float(plane.share(plane.mutual)), "layers": layers}
