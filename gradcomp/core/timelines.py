"""Reads the timelines of several ranks, and joins a window of steps into one Chrome trace."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from gradcomp.core.errors import ConfigError
from gradcomp.core.trace import range_name

#: Identifies a round of messages on all ranks: exchange, step, bucket and number of the round.
RoundKey = tuple[str, int, int, int]


@dataclass(frozen=True)
class Round:
    """One rank's part in a round of messages, in seconds of its own clock, and the ranks that it waited for."""

    begin: float
    end: float
    senders: tuple[int, ...]


@dataclass(frozen=True)
class RankTimeline:
    """The record of one rank.

    ``clock`` names the clock behind its times, which reads ``zero`` seconds at the time 0 of ``events``; ``began`` is
    the time of day then. ``ranks`` are those of all its exchanges.
    """

    path: str
    rank: int
    clock: str
    zero: float
    began: float
    job: str
    ranks: frozenset[int]
    events: list[dict[str, Any]] = field(repr=False)
    #: By row: exchange and bucket.
    rows: dict[int, tuple[str, int]] = field(repr=False)

    def seconds(self, event: dict[str, Any]) -> tuple[float, float]:
        """Returns begin and end of an event by this rank's clock."""
        begin = self.zero + event["ts"] / 1e6
        return begin, begin + event.get("dur", 0.0) / 1e6

    def steps(self) -> set[int]:
        return {event["args"]["step"] for event in self.events if _has_step(event)}

    def rounds(self, first: int, last: int) -> dict[RoundKey, Round]:
        """Returns the rounds of these steps. Those that occur twice, as after loading a checkpoint, are left out."""
        found: dict[RoundKey, Round] = {}
        twice = set()
        for event in self.events:
            args = event.get("args", {})
            if "round" not in args or not first <= args["step"] <= last:
                continue
            exchange, bucket = self.rows[event["tid"]]
            key = exchange, args["step"], bucket, args["round"]
            if key in found:
                twice.add(key)
            found[key] = Round(*self.seconds(event), tuple(args["from"]))
        return {key: one for key, one in found.items() if key not in twice}


def _has_step(event: dict[str, Any]) -> bool:
    return "step" in event.get("args", {})


def read_all(paths: Iterable[str]) -> list[RankTimeline]:
    """Returns the timelines in these files, by rank.

    Raises ConfigError for a file that is no timeline, for two files of one rank, and for files of different jobs.
    """
    timelines = sorted(map(read, paths), key=lambda each: each.rank)
    if not timelines:
        raise ConfigError("no timeline was given")
    for one, other in pairwise(timelines):
        if one.rank == other.rank:
            raise ConfigError(f"{one.path} and {other.path} are both of rank {one.rank}")
    first = timelines[0]
    for other in timelines[1:]:
        if other.job != first.job:
            raise ConfigError(f"{first.path} and {other.path} are of different jobs")
    return timelines


def read(path: str) -> RankTimeline:
    """Returns the timeline in a file; raises ConfigError if it holds none, or no step."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the timeline {path}: {error}") from error
    try:
        found = _parse(path, json.loads(text))
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise ConfigError(
            f"{path} is no timeline that GRADCOMP_TIMELINE or start_timeline() wrote: {type(error).__name__}: {error}"
        ) from error
    if not found.steps():
        raise ConfigError(f"{path}: no step was recorded")
    return found


def _parse(path: str, content: Any) -> RankTimeline:
    head, *events = content["traceEvents"]
    about = head["args"]
    rows: dict[int, tuple[str, int]] = {}
    ranks: set[int] = set()
    jobs: set[str] = set()
    for event in events:
        kind, args = event["ph"], event.get("args", {})
        if not (isinstance(event["name"], str) and type(event["tid"]) is int and isinstance(args, dict)):
            raise ValueError("an event has no name, row or arguments")
        if kind == "M":
            str(args["name"])
            if "exchange" in args:
                rows[event["tid"]] = str(args["exchange"]), int(args["bucket"])
                ranks.update(map(int, args["ranks"]))
                jobs.add(str(args["job"]))
        elif not (math.isfinite(event["ts"]) and math.isfinite(event.get("dur", 0.0))):
            raise ValueError("a time is not finite")
        if _has_step(event) and not (type(args["step"]) is int and event["tid"] in rows):
            raise ValueError("a step has no row")
        if "round" in args and not (
            _has_step(event) and all(type(n) is int for n in (args["round"], *args["from"]))
        ):
            raise ValueError("a round has no step")
    if len(jobs) > 1:
        raise ValueError("it has steps of several jobs")
    zero, began = float(about["zero"]), float(about["began"])
    if not (math.isfinite(zero) and math.isfinite(began)):
        raise ValueError("a time is not finite")
    job = next(iter(jobs), "")
    return RankTimeline(
        path, int(head["pid"]), str(about["clock"]), zero, began, job, frozenset(ranks), events, rows
    )


def window(timelines: Sequence[RankTimeline], first: int | None, last: int | None) -> tuple[int, int]:
    """Returns the first and the last recorded step of a window; ConfigError if no rank has recorded any of it."""
    steps = set().union(*(each.steps() for each in timelines))
    inside = {step for step in steps if (first is None or first <= step) and (last is None or step <= last)}
    if not inside:
        wanted = f"{'the begin' if first is None else first} to {'the end' if last is None else last}"
        raise ConfigError(
            f"no step of {wanted} was recorded: the files have steps {min(steps)} to {max(steps)}"
        )
    return min(inside), max(inside)


def joined(
    timelines: Sequence[RankTimeline], aligned: Callable[[int, float], float], first: int, last: int
) -> dict[str, Any]:
    """Returns the Chrome trace of steps ``first`` to ``last`` on all ranks, one process each.

    ``aligned(i, seconds)`` converts a time of timeline i's clock. Phases have the names of the profiler's ranges, and
    times begin with 0. Events without a step, such as the user's own collectives, are kept between the rank's first and
    last event of these steps.
    """
    placed: list[tuple[float, dict[str, Any]]] = []
    heads: list[dict[str, Any]] = []
    for i, timeline in enumerate(timelines):
        rank = timeline.rank
        inside = [e for e in timeline.events if _has_step(e) and first <= e["args"]["step"] <= last]
        times = [timeline.seconds(event) for event in inside]
        begin = min((since for since, _ in times), default=math.inf)
        end = max((until for _, until in times), default=-math.inf)
        apart = [e for e in timeline.events if e["ph"] != "M" and not _has_step(e)]
        others = [e for e in apart if begin <= timeline.seconds(e)[0] and timeline.seconds(e)[1] <= end]
        heads += [
            _head(rank, "process_name", name=f"rank {rank}"),
            _head(rank, "process_sort_index", sort_index=rank),
        ]
        rows = {event["tid"] for event in (*inside, *others)}
        for event in timeline.events:
            if event["ph"] == "M" and event["tid"] in rows:
                heads.append(_head(rank, "thread_name", event["tid"], name=event["args"]["name"]))
                heads.append(_head(rank, "thread_sort_index", event["tid"], sort_index=event["tid"]))
        for event in (*inside, *others):
            name = range_name(event["name"]) if _has_step(event) else event["name"]
            placed.append((aligned(i, timeline.seconds(event)[0]), {**event, "name": name, "pid": rank}))
    zero = min(time for time, _ in placed)
    spans = [
        {**event, "ts": round((time - zero) * 1e6, 3)} for time, event in sorted(placed, key=lambda p: p[0])
    ]
    return {"displayTimeUnit": "ms", "traceEvents": [*heads, *spans]}


def _head(rank: int, kind: str, row: int = 0, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "pid": rank, "tid": row, "name": kind, "args": args}
