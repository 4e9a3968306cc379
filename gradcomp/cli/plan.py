"""``gradcomp plan show run.jsonl`` prints the plan of a run and its history; ``--png`` draws it."""

from __future__ import annotations

from typing import Any

import click
from rich.table import Table

from gradcomp.cli.output import json_option, print_json, show, table
from gradcomp.core.errors import ConfigError
from gradcomp.core.journal import Logged, Run, histogram, read_run
from gradcomp.core.plan import level_text, names, readable


@click.group()
def command() -> None:
    """Plans: which compressor, at which level, for every layer."""


@command.command("show")
@click.argument("file", type=click.Path())
@click.option(
    "--run", "number", type=int, metavar="N", help="The N-th run in the file, from 1; default: the last."
)
@click.option("--step", type=int, metavar="S", help="The plan in force at this step; default: the last.")
@click.option("--png", metavar="OUT", help="Draw the profile: level and size of every layer.")
@json_option
def show_plan(file: str, number: int | None, step: int | None, png: str | None, as_json: bool) -> None:
    """Print a plan of a run, and the history of its plans.

    FILE is the run log: what GRADCOMP_RUN_LOG named.
    """
    run, number, runs = read_run(file, number)
    shown = run.in_force(step)
    if shown is None:
        begin = f": the first begins at step {run.plans[0].step}" if run.plans else ""
        when = "" if step is None else f" in force at step {step}"
        raise ConfigError(f"{file}: run {number} has no plan{when}{begin}")
    if png is not None:
        from gradcomp.plots import draw_profile  # which needs an extra

        draw_profile(run, shown, png)
    if as_json:
        print_json(_as_json(run, number, shown))
        return
    parts: list[str | Table] = [
        _head(run, number, runs),
        f"plan {shown.plan.version}, from step {shown.step}",
        _layers(run, shown),
        "history, in bytes that one rank sends a step; ratio: to an uncompressed exchange",
        _history(run, shown),
    ]
    if run.choices:
        parts += ["reasons", "\n".join(f"step {step}: {readable(text)}" for step, text in run.choices)]
    if png is not None:
        parts.append(f"profile: {readable(png)}")
    show(*parts)


def _head(run: Run, number: int, runs: int) -> str:
    facts = {
        "run": f"{number} of {runs}, by gradcomp {run.version}",
        "ranks": str(run.world),
        "compression": run.compression,
        "controller": run.controller or "none",
    }
    return "\n".join(f"{fact:<13}{readable(text)}" for fact, text in facts.items())


def _layers(run: Run, shown: Logged) -> Table:
    named = names(a.compressor for a in shown.plan.assignments)
    elements = sum(layer.size for layer in run.layers)
    rows = []
    for number, layer in enumerate(run.layers, 1):
        a = shown.plan.by_layer[layer.name]
        share, level = f"{layer.size / max(elements, 1):.2%}", level_text(a.compressor, a.level)
        sent = "-" if shown.layer_bytes is None else f"{shown.layer_bytes[number - 1]:,}"
        how = named[a.compressor], level, f"{layer.nbytes:,}", sent
        rows.append([str(number), layer.name, f"{layer.size:,}", share, *how])
    dense = sum(layer.nbytes for layer in run.layers)
    rows.append(["", "total", f"{elements:,}", "", "", "", f"{dense:,}", f"{shown.predicted_bytes:,}"])
    heads = ["#", "layer", "elements", "share", "compressor", "level", "dense bytes", "bytes sent"]
    return table(heads, rows, left={1, 4, 5})


def _history(run: Run, shown: Logged) -> Table:
    rows = []
    for logged in run.plans:
        columns = ["*" if logged is shown else "", str(logged.step), str(logged.plan.version)]
        for sent in (logged.predicted_bytes, logged.measured_bytes):
            ratio = None if sent is None else run.ratio(sent)
            columns += ["-" if sent is None else f"{sent:,.0f}", "-" if ratio is None else f"{ratio:.2f}x"]
        rows.append([*columns, histogram(logged.plan)])
    heads = ["", "step", "version", "predicted", "ratio", "measured", "ratio", "layers by level"]
    return table(heads, rows, left={7})


def _as_json(run: Run, number: int, shown: Logged) -> dict[str, Any]:
    layers = []
    for place, layer in enumerate(run.layers):
        a = shown.plan.by_layer[layer.name]
        layers.append(
            {
                "name": layer.name,
                "shape": layer.shape,
                "dtype": layer.dtype,
                "compressor": a.compressor,
                "level": a.level,
                "dense_bytes": layer.nbytes,
                "predicted_bytes": None if shown.layer_bytes is None else shown.layer_bytes[place],
            }
        )
    history = [
        {
            "step": logged.step,
            "version": logged.plan.version,
            "predicted_bytes": logged.predicted_bytes,
            "measured_bytes": logged.measured_bytes,
            "shown": logged is shown,
        }
        for logged in run.plans
    ]
    return {
        "run": number,
        "version": run.version,
        "ranks": run.world,
        "compression": run.compression,
        "controller": run.controller or None,
        "plan": shown.plan.version,
        "layers": layers,
        "history": history,
        "reasons": [{"step": step, "text": text} for step, text in run.choices],
    }
