"""The command ``gradcomp`` shows the plans of a run's log, and the information that recorded gradients share.

``gradcomp plan show run.jsonl`` prints the plan and its history, ``gradcomp mi run.npz`` the information plane of
recorded gradients; ``--png`` draws them.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from typing import NoReturn, get_args

import numpy as np

from gradcomp.analysis import Plane, information_plane
from gradcomp.analysis import read as read_recording
from gradcomp.contrib.information import Binning, Correction
from gradcomp.core.errors import ConfigError, GradcompError
from gradcomp.core.journal import Logged, Run, histogram, read
from gradcomp.core.plan import level_text, names, readable
from gradcomp.version import __version__


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns 0, or 2 for bad input, which one line on stderr explains."""
    options = _parser().parse_args(arguments)
    try:
        text = options.show(options)
    except GradcompError as error:
        sys.stderr.write(f"gradcomp: {readable(str(error))}\n")
        return 2
    try:
        if isinstance(sys.stdout, io.TextIOWrapper):
            # A terminal may not show all characters of layer names.
            sys.stdout.reconfigure(errors="backslashreplace")
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader left, as `| head` does; redirecting avoids another error at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


class _Parser(argparse.ArgumentParser):
    """An argument parser that reports an error on one line, as the command does."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {readable(message)} (try {self.prog} --help)\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="gradcomp", description="Inspect the logs of a gradcomp run.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"gradcomp {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    plan = commands.add_parser("plan", help="plans: which compressor, at which level, for every layer")
    show = plan.add_subparsers(required=True, metavar="COMMAND").add_parser(
        "show", help="print a plan of a run, and the history of its plans"
    )
    show.add_argument("file", metavar="FILE", help="the run log: what GRADCOMP_RUN_LOG named")
    show.add_argument(
        "--run", type=int, metavar="N", help="the N-th run in the file, from 1; default: the last"
    )
    show.add_argument(
        "--step", type=int, metavar="S", help="the plan in force at this step; default: the last"
    )
    show.add_argument("--png", metavar="OUT", help="draw the profile: level and size of every layer")
    show.set_defaults(show=_plan_show)
    mi = commands.add_parser("mi", help="the information that the gradients of two ranks share")
    mi.add_argument("file", metavar="FILE", help="the recording: what record_gradients() wrote")
    mi.add_argument(
        "--pair",
        type=int,
        nargs=2,
        action="append",
        metavar=("A", "B"),
        help="ranks; default: 0 and 1; several",
    )
    mi.add_argument(
        "--layer", action="append", metavar="PATTERN", help="layers by shell pattern; default: all"
    )
    mi.add_argument(
        "--bins", type=int, metavar="N", help="bins of each histogram; default: 2 m^(1/3) for m elements"
    )
    mi.add_argument("--binning", choices=get_args(Binning), default="uniform", help="default: uniform")
    mi.add_argument("--correction", choices=get_args(Correction), default="none", help="default: none")
    mi.add_argument(
        "--shuffles", type=int, default=4, metavar="N", help="permutations of the null; default: 4"
    )
    mi.add_argument("--png", metavar="OUT", help="draw bits over steps and over layers")
    mi.set_defaults(show=_information)
    return parser


def _plan_show(options: argparse.Namespace) -> str:
    runs = read(options.file)
    number = len(runs) if options.run is None else options.run
    if not runs:
        raise ConfigError(f"{options.file}: no run in this file")
    if not 1 <= number <= len(runs):
        raise ConfigError(f"{options.file}: no run {number}; there are runs 1 to {len(runs)}")
    run = runs[number - 1]
    shown = run.in_force(options.step)
    if shown is None:
        begin = f": the first begins at step {run.plans[0].step}" if run.plans else ""
        when = "" if options.step is None else f" in force at step {options.step}"
        raise ConfigError(f"{options.file}: run {number} has no plan{when}{begin}")
    lines = _head(run, number, len(runs))
    lines += ["", f"plan {shown.plan.version}, from step {shown.step}", "", *_layers(run, shown)]
    lines += ["", "history, in bytes that one rank sends a step; ratio: to an uncompressed exchange", ""]
    lines += _history(run, shown)
    if run.choices:
        lines += ["", "reasons", "", *(f"step {step}: {readable(text)}" for step, text in run.choices)]
    if options.png is not None:
        from gradcomp.plots import draw_profile  # which needs an extra

        draw_profile(run, shown, options.png)
        lines += ["", f"profile: {readable(options.png)}"]
    return "\n".join([*lines, ""])


def _head(run: Run, number: int, runs: int) -> list[str]:
    facts = {
        "run": f"{number} of {runs}, by gradcomp {run.version}",
        "ranks": str(run.world),
        "compression": run.compression,
        "controller": run.controller or "none",
    }
    return [f"{fact:<13}{readable(text)}" for fact, text in facts.items()]


def _layers(run: Run, shown: Logged) -> list[str]:
    named = names(a.compressor for a in shown.plan.assignments)
    elements = sum(layer.size for layer in run.layers)
    rows = [["#", "layer", "elements", "share", "compressor", "level", "dense bytes"]]
    for number, layer in enumerate(run.layers, 1):
        a = shown.plan.by_layer[layer.name]
        share, level = f"{layer.size / max(elements, 1):.2%}", level_text(a.compressor, a.level)
        sizes = f"{layer.size:,}", share
        rows.append([str(number), layer.name, *sizes, named[a.compressor], level, f"{layer.nbytes:,}"])
    rows.append(["", "total", f"{elements:,}", "", "", "", f"{sum(layer.nbytes for layer in run.layers):,}"])
    return _table(rows, left={1, 4, 5})


def _history(run: Run, shown: Logged) -> list[str]:
    rows = [["", "step", "version", "predicted", "ratio", "measured", "ratio", "layers by level"]]
    for logged in run.plans:
        columns = ["*" if logged is shown else "", str(logged.step), str(logged.plan.version)]
        for sent in (logged.predicted_bytes, logged.measured_bytes):
            ratio = None if sent is None else run.ratio(sent)
            columns += ["-" if sent is None else f"{sent:,.0f}", "-" if ratio is None else f"{ratio:.2f}x"]
        rows.append([*columns, histogram(logged.plan)])
    return _table(rows, left={7})


def _information(options: argparse.Namespace) -> str:
    recording = read_recording(options.file)
    names = ("bins", "binning", "correction", "shuffles")
    settings = {"layers": options.layer, **{name: getattr(options, name) for name in names}}
    pairs = options.pair or [(0, 1)]
    planes = [information_plane(recording, (first, second), **settings) for first, second in pairs]
    steps = recording.steps
    facts = {
        "recorded": f"{len(steps)} steps, {steps[0]} to {steps[-1]}, by gradcomp {recording.version}",
        "ranks": str(recording.ranks),
        "histogram": f"{options.binning}, {options.bins or '2 m^(1/3)'} bins, correction {options.correction}",
    }
    lines = [f"{fact:<11}{readable(text)}" for fact, text in facts.items()]
    for plane in planes:
        first, second = plane.pair
        lines += ["", f"ranks {first} and {second}: bits per element, means over steps", "", *_plane(plane)]
        mutual, null = plane.share(plane.mutual), plane.share(plane.null)
        beside = "" if np.isnan(null) else f", and of shuffled pairs {null:.1%}"
        lines += ["", f"mutual information is {mutual:.1%} of the entropy{beside}"]
    if options.png is not None:
        from gradcomp.plots import draw_information  # which needs an extra

        draw_information(planes, options.png)
        lines += ["", f"figure: {readable(options.png)}"]
    return "\n".join([*lines, ""])


def _plane(plane: Plane) -> list[str]:
    heads = ["#", "layer", "elements", "of", "H", "H(b|a)", "I", "shuffled", "excess", "I/H"]
    rows = [[*heads, "Gaussian", "estimated"]]
    columns = [plane.entropy, plane.conditional, plane.mutual, plane.null, plane.mutual - plane.null]
    bits = [plane.mean(column) for column in columns]
    known = plane.mean(plane.gaussian)
    for number, layer in enumerate(plane.layers):
        entropy, mutual = float(bits[0][number]), float(bits[2][number])
        rows.append(
            [
                str(number + 1),
                layer.name,
                f"{plane.elements[number]:,}",
                f"{layer.size:,}",
                *(_bits(column[number]) for column in bits),
                f"{mutual / entropy:.1%}" if entropy > 0 else "-",
                _bits(known[number]),
                _bits(plane.calibration[number]),
            ]
        )
    return _table(rows, left={1})


def _bits(value: float) -> str:
    return "-" if np.isnan(value) else f"{value:.3f}"


def _table(rows: list[list[str]], left: set[int]) -> list[str]:
    """Formats columns two spaces apart; those of ``left`` are left-aligned, the others right-aligned."""
    rows = [[readable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = zip(row, widths, strict=True)
        padded = (c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(cells))
        lines.append("  ".join(padded).rstrip())
    return lines
