"""``gradcomp report run.jsonl -o report.html`` makes a page of a run log, or of two that are compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from gradcomp.cli.output import json_option, print_json, show
from gradcomp.core.errors import ConfigError
from gradcomp.core.journal import read_run
from gradcomp.report.summary import summarise


@click.command("report")
@click.argument("file", type=click.Path())
@click.argument("other", type=click.Path(), required=False)
@click.option("-o", "--out", type=click.Path(), help="Write the page to this file.")
@click.option(
    "--run", "number", type=int, metavar="N", help="The N-th run in FILE, from 1; default: the last."
)
@json_option
def command(file: str, other: str | None, out: str | None, number: int | None, as_json: bool) -> None:
    """Make a page of a run: where a step's time went, bytes, errors and levels by layer, and stragglers.

    FILE is the run log: what GRADCOMP_RUN_LOG named. The last run of OTHER is compared with it. The page is one file
    that loads nothing from elsewhere. Without -o the verdict alone is printed.
    """
    summary = _summary(file, number)
    compared = None if other is None else (_title(other), _summary(other, None))
    if out is not None:
        from gradcomp.report.page import render

        title = _title(file)
        if compared is not None and compared[0] == title:
            title, compared = f"{title} (first)", (f"{title} (second)", compared[1])
        try:
            Path(out).write_text(render(summary, title, compared), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write the report {out}: {error.strerror or error}") from error
    if as_json:
        print_json({**summary, "other": None if compared is None else compared[1], "page": out})
        return
    lines = [summary["verdict"], *([] if compared is None else [f"{compared[0]}: {compared[1]['verdict']}"])]
    show("\n".join(lines + ([] if out is None else [f"page: {out}"])))


def _title(file: str) -> str:
    return Path(file).name


def _summary(file: str, number: int | None) -> dict[str, Any]:
    return summarise(read_run(file, number)[0])
