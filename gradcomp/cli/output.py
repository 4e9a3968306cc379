"""Exit codes, tables and JSON, which all commands share."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import Any

import click
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from gradcomp.core.plan import readable

#: Lines are as long as their content where no terminal limits them: a reader of a file or a pipe cuts them itself.
_UNLIMITED = 1 << 16


class Exit(IntEnum):
    """The exit codes, one for each outcome, of all commands."""

    OK = 0
    BAD_INPUT = 2  # an argument, a file or a setting is wrong
    NO_GAIN = 3  # estimate, bench: compression gains nothing
    ERRORS_FOUND = 4  # doctor: a finding is an error
    NOT_MEASURED = 5  # doctor, bench: a rank is missing, or a measurement failed
    INTERRUPTED = 130


#: The option ``--json``, which every command has.
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")


def print_json(value: Any) -> None:
    """Prints a value as JSON; numbers that are not finite are null."""
    sys.stdout.write(json.dumps(_finite(value), indent=2, allow_nan=False) + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not (abs(value) < float("inf")) else value


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], left: Iterable[int] = ()) -> Table:
    """Returns a table with columns two spaces apart; those of ``left`` are left-aligned, the others right-aligned."""
    made, lefts = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold"), set(left)
    for number, head in enumerate(heads):
        side: Any = "left" if number in lefts else "right"
        made.add_column(Text(readable(head)), justify=side, overflow="fold")
    for row in rows:
        made.add_row(*(Text(readable(cell)) for cell in row))
    return made


def show(*parts: RenderableType) -> None:
    """Prints texts and tables, a blank line between them; a text may have several lines."""
    terminal = Console(soft_wrap=True) if sys.stdout.isatty() else None
    for number, part in enumerate(parts):
        shown = Text(part) if isinstance(part, str) else part
        if terminal is not None:
            terminal.print(*([""] if number else []), shown, sep="\n")
            continue
        file = io.StringIO()
        Console(file=file, width=_UNLIMITED, soft_wrap=True).print(shown)
        lines = [line.rstrip() for line in file.getvalue().rstrip("\n").split("\n")]
        sys.stdout.write("\n" * bool(number) + "\n".join(lines) + "\n")
