"""A finding: what was seen on some ranks, whether that is wrong, and what to do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum


class Level(IntEnum):
    """How bad a finding is."""

    OK = 0
    WARNING = 1
    ERROR = 2


#: What findings are about, in the order in which they are shown.
SUBJECTS = (
    "settings", "versions", "libraries", "kernels", "launcher", "meeting", "ranks", "hosts", "interface", "ports",
    "links", "collectives", "transports", "gpus", "cores", "threads", "limits", "memory", "disk", "secret",
)  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """One thing that was seen.

    ``found`` is a sentence without its full stop. ``advice`` says what to do; a finding that is ok may have none.
    ``ranks`` are those on which it was seen, ascending; empty: it is about the whole job.
    """

    level: Level
    about: str
    found: str
    advice: str = ""
    ranks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        assert self.about in SUBJECTS, self.about
        assert self.advice or self.level is Level.OK, self.found


def ok(about: str, found: str, *ranks: int) -> Finding:
    return Finding(Level.OK, about, found, "", ranks)


def warning(about: str, found: str, advice: str, *ranks: int) -> Finding:
    return Finding(Level.WARNING, about, found, advice, ranks)


def error(about: str, found: str, advice: str, *ranks: int) -> Finding:
    return Finding(Level.ERROR, about, found, advice, ranks)


def merged(findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings in the order of their subjects, with equal ones of several ranks made one."""
    by_text: dict[Finding, list[int]] = {}
    for each in findings:
        by_text.setdefault(replace(each, ranks=()), []).extend(each.ranks)
    made = [replace(each, ranks=tuple(sorted(set(ranks)))) for each, ranks in by_text.items()]
    return sorted(made, key=lambda each: SUBJECTS.index(each.about))


def worst(findings: Iterable[Finding]) -> Level:
    return max((each.level for each in findings), default=Level.OK)


def ranks_text(ranks: Sequence[int], size: int) -> str:
    """Return ranks for a reader: "all", or runs of them, such as "0-3, 6"."""
    if len(ranks) == size and size > 1:
        return "all"
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
