"""Describes plans in words: short names of compressors, levels with their unit, and a histogram of the layers.

A family is the string form of a compressor without its level, as plans name it. A log may be read where the package of
a compressor is not installed. Names are therefore derived from the strings alone; only the unit of a level needs
the compressor to be registered.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from gradcomp.core.plan import Level, Plan
from gradcomp.core.registry import COMPRESSORS

EXACT = "exact"

#: Compressor name -> kind of its level. Compressors without a level, and those not registered here, are missing.
#: `gradcomp.compress.registry.register` adds entries.
LEVELS: dict[str, str] = {name: field for name, (_, field) in COMPRESSORS.items()}

#: A histogram lists up to so many levels per compressor; of more it gives the lowest, the highest and the median.
MOST_LEVELS = 12


def short_name(family: str) -> str:
    """Returns a family without its fields: ``topk``, ``error_feedback[topk]``; a cast is named by its dtype.

    It is :data:`EXACT` if nothing is lost.
    """
    head = _head(family)
    outer, bracket, name = head.rpartition("[")
    inner = family[len(outer + bracket) :]
    cast = re.match(r"cast:dtype=(\w+)", inner)
    if name == "none" or (cast and cast[1] == "float32"):
        return EXACT
    return outer + bracket + (cast[1] if cast else name) + "]" * head.count("[")


def names(families: Iterable[str]) -> dict[str, str]:
    """Returns short names by family. Equal names get the fields in which they differ, or else the whole family.

    All families that lose nothing are named :data:`EXACT`.
    """
    alike: dict[str, list[str]] = {}
    for family in sorted(set(families)):
        alike.setdefault(short_name(family), []).append(family)
    named = {}
    for name, members in alike.items():
        fields = {family: _fields(family) for family in members}
        common = set.intersection(*map(set, fields.values()))
        for family in members:
            own = ",".join(field for field in fields[family] if field not in common)
            named[family] = f"{name}({own})" if own and name != EXACT else name
        if len({named[family] for family in members}) < len(members) and name != EXACT:
            named.update(
                zip(members, members, strict=True)
            )  # equal fields that belong to different nested compressors
    return named


def level_kind(family: str) -> str | None:
    """Returns the kind of the family's level: bits, rank, density or threshold; None if it has none or is not known."""
    return LEVELS.get(_head(family).rpartition("[")[2])


def level_text(family: str, level: Level) -> str:
    """Returns a level with its unit, a range for levels by block, and an empty text for None."""
    if level is None:
        return ""
    if isinstance(level, tuple):
        number = str(level[0]) if min(level) == max(level) else f"{min(level)}-{max(level)}"
    else:
        number = f"{level:g}" if isinstance(level, float) else str(level)
    match level_kind(family):
        case "bits":
            return f"{number} bit" if number == "1" else f"{number} bits"
        case "rank":
            return f"rank {number}"
    return number


def level_number(level: Level) -> float:
    """Returns a level as one number: the mean of levels by block, 0 for None."""
    if isinstance(level, tuple):
        return sum(level) / len(level)
    return 0.0 if level is None else float(level)


def readable(text: str) -> str:
    """Returns text from a file for one line of a terminal: characters that are not visible are escaped."""
    return text if text.isprintable() else repr(text)[1:-1]


def histogram(plan: Plan) -> str:
    """Returns the number of layers by compressor and level.

    An example is ``quantize: 2 bits x 12, 3 bits x 40; topk: 0.01 x 3; exact x 21``, exact layers last.
    """
    named = names(a.compressor for a in plan.assignments)
    layers: dict[str, list[tuple[float, str]]] = {}
    for a in plan.assignments:
        layers.setdefault(named[a.compressor], []).append(
            (level_number(a.level), level_text(a.compressor, a.level))
        )
    parts = sorted(layers, key=lambda name: (name == EXACT, name))
    return "; ".join(_part(name, sorted(layers[name])) for name in parts)


def _part(name: str, levels: list[tuple[float, str]]) -> str:
    counts = Counter(text for _, text in levels)  # in order of level
    if len(counts) > MOST_LEVELS:
        texts = list(counts)
        middle = levels[len(levels) // 2][1]
        return f"{name}: {texts[0]} to {texts[-1]}, median {middle}, x {len(levels)}"
    if list(counts) == [""]:
        return f"{name} x {len(levels)}"
    return f"{name}: " + ", ".join(f"{text or 'no level'} x {count}" for text, count in counts.items())


def _head(family: str) -> str:
    """Returns the text before the first field or closing bracket: ``error_feedback[topk``."""
    return re.split(r"[\]:]", family, maxsplit=1)[0]


def _fields(family: str) -> list[str]:
    """Returns the ``name=value`` parts, those of nested compressors included, in order."""
    return [part for part in re.split(r"[\[\],:]+", family) if "=" in part and not part.endswith("=")]
