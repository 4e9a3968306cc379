"""``gradcomp trace timeline-*.json -o trace.json`` joins the timelines of all ranks, with their clocks aligned."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from gradcomp.cli.output import json_option, print_json, show, table
from gradcomp.core.alignment import ClockFit, align
from gradcomp.core.errors import ConfigError
from gradcomp.core.plan import readable
from gradcomp.core.timelines import RankTimeline, joined, read_all, window

_RANK = "{rank}"


@click.command("trace")
@click.argument("files", nargs=-1, required=True, type=click.Path())
@click.option("-o", "--output", required=True, metavar="OUT", help="The Chrome trace to write.")
@click.option(
    "--from-step", type=int, metavar="A", help="The first step of the window; default: the first recorded."
)
@click.option(
    "--to-step", type=int, metavar="B", help="The last step of the window; default: the last recorded."
)
@json_option
def command(
    files: tuple[str, ...], output: str, from_step: int | None, to_step: int | None, as_json: bool
) -> None:
    """Join the timelines of all ranks into one Chrome trace, with their clocks aligned.

    FILES are what GRADCOMP_TIMELINE or start_timeline() wrote, one for each rank: their names, or a pattern with {rank}
    in it. Phases have the names of torch.profiler's ranges. Open OUT in chrome://tracing or Perfetto.
    """
    timelines = read_all(path for name in files for path in _expanded(name))
    first, last = window(timelines, from_step, to_step)
    fits = align(timelines, first, last)
    rows = [_row(*each, timelines[0], first, last) for each in zip(timelines, fits, strict=True)]
    ranks = frozenset[int]().union(*(timeline.ranks for timeline in timelines))
    missing = sorted(ranks - {timeline.rank for timeline in timelines})
    trace = joined(timelines, lambda i, seconds: fits[i].at(seconds), first, last)
    summary = {"output": output, "from_step": first, "to_step": last, "ranks": rows, "missing_ranks": missing}
    _write(output, {**trace, "otherData": summary})
    if as_json:
        print_json(summary)
    else:
        show(*_parts(rows, missing, f"steps {first} to {last} of {len(timelines)} ranks: {readable(output)}"))


def _expanded(name: str) -> list[str]:
    """Returns the files that a name with ``{rank}`` stands for, or the name itself."""
    path = Path(name)
    if _RANK not in path.name:
        return [name]
    pattern = re.compile(re.escape(path.name).replace(re.escape(_RANK), r"\d+"))
    found = [str(one) for one in path.parent.glob("*") if pattern.fullmatch(one.name)]
    if not found:
        raise ConfigError(f"no file is named {name}, with a number for {_RANK}")
    return sorted(found)


def _row(
    timeline: RankTimeline, fit: ClockFit, reference: RankTimeline, first: int, last: int
) -> dict[str, Any]:
    """Returns what is told of a rank; its clock is compared with the first rank's by the time of day of both."""
    day = timeline.began - fit.at(timeline.zero) - (reference.began - reference.zero)
    return {
        "rank": timeline.rank,
        "file": timeline.path,
        "steps": sum(first <= step <= last for step in timeline.steps()),
        "offset_ms": 1e3 * day + 0.0,
        "error_bound_ms": 1e3 * fit.error_seconds,
    }


def _parts(rows: Sequence[dict[str, Any]], missing: Sequence[int], title: str) -> list[Any]:
    cells = [
        [
            str(row["rank"]),
            f"{row['steps']:,}",
            f"{row['offset_ms']:+.3f}",
            f"{row['error_bound_ms']:.3f}",
            row["file"],
        ]
        for row in rows
    ]
    heads = ["rank", "steps", "clock ahead, ms", "error bound, ms", "file"]
    parts: list[Any] = [title, table(heads, cells, left={4})]
    if missing:
        parts.append(f"no file of rank {', '.join(map(str, missing))}")
    return parts


def _write(path: str, trace: dict[str, Any]) -> None:
    try:
        Path(path).write_text(json.dumps(trace), encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot write the trace {path}: {error}") from error
