"""The plan assigns a compressor and a level to every layer; plans in words.

A family is the string form of a compressor without its level, as plans name it.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from gradcomp.core.errors import ConfigError, WireFormatError
from gradcomp.core.layers import LayerSpec
from gradcomp.core.registry import COMPRESSORS

#: The level of a layer, or of each of its blocks of rows.
Level = int | float | None | tuple[int, ...]

#: The largest number of blocks of a layer.
MOST_BLOCKS = 256

EXACT = "exact"

#: Compressor name -> kind of its level. Compressors without a level, and those not registered here, are missing.
#: `gradcomp.compress.registry.register` adds entries.
LEVELS: dict[str, str] = {name: field for name, (_, field) in COMPRESSORS.items()}

#: The most levels per compressor that a histogram lists; of more it gives the lowest, the highest and the median.
MOST_LEVELS = 12


@dataclass(frozen=True)
class Assignment:
    """One layer's entry: ``compressor`` is the string form without its level, ``level`` the level.

    A tuple has a level for each block of rows: see :mod:`gradcomp.compress.blocks`. In JSON it is a list.
    ``built`` is the compressor itself if it is known, so that its text need not be parsed; it is no part of the
    value. See :func:`gradcomp.compress.policy.assign`.
    """

    layer: str
    compressor: str
    level: Level = None
    built: Any = field(default=None, init=False, repr=False, compare=False)


@dataclass(frozen=True)
class Plan:
    """Maps layers to compressors and levels, in the order of the layers; equal on all ranks.

    ``version`` grows by one with every change. ``digest`` identifies plan and layers together: ranks compare it
    before the first exchange, and its first four bytes are sent in every header.
    """

    version: int
    assignments: tuple[Assignment, ...]

    def __post_init__(self) -> None:
        if self.version < 0:
            raise ConfigError(f"plan version must not be negative, got {self.version}")
        if len(self.by_layer) != len(self.assignments):
            raise ConfigError("a layer is assigned twice")

    @cached_property
    def by_layer(self) -> Mapping[str, Assignment]:
        """Returns the assignments by layer name."""
        return {a.layer: a for a in self.assignments}

    def to_json(self) -> str:
        """Returns canonical text: equal plans give equal text."""
        return _begin(self.assignments) + _end(self.version)

    @staticmethod
    def from_json(text: str) -> Plan:
        """Inverse of :meth:`to_json`; raises WireFormatError on anything else."""
        try:
            data: dict[str, Any] = json.loads(text)
            rows = tuple(_assignment(*row) for row in data["assignments"])
            if type(data["version"]) is not int:
                raise TypeError(f"version {data['version']!r}")
            return Plan(data["version"], rows)
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise WireFormatError(f"not a plan: {error}") from error

    def digest(self, layers: Sequence[LayerSpec]) -> bytes:
        """Returns the SHA-256 of the plan and the manifest of the layers."""
        return Fingerprint(self.assignments, layers).digest(self.version)

    def check_covers(self, layers: Iterable[LayerSpec]) -> None:
        """Raises ConfigError unless the plan assigns exactly these layers."""
        names = {layer.name for layer in layers}
        planned = set(self.by_layer)
        if names != planned:
            raise ConfigError(
                f"plan does not fit the layers: without assignment {sorted(names - planned)}, "
                f"unknown {sorted(planned - names)}"
            )


class Fingerprint:
    """The part of a digest that all versions of a plan share, hashed once."""

    def __init__(self, assignments: Sequence[Assignment], layers: Sequence[LayerSpec]) -> None:
        self._begun = hashlib.sha256(_begin(assignments).encode())
        self._manifest = manifest(layers)

    def digest(self, version: int) -> bytes:
        """Returns :meth:`Plan.digest` of the plan with this version."""
        hashed = self._begun.copy()
        hashed.update((_end(version) + self._manifest).encode())
        return hashed.digest()


def _begin(assignments: Sequence[Assignment]) -> str:
    """Returns the canonical text of a plan up to its version; keys are sorted."""
    rows = [[a.layer, a.compressor, a.level] for a in assignments]
    return f'{{"assignments":{json.dumps(rows, separators=(",", ":"))}'


def _end(version: int) -> str:
    return f',"version":{version}}}'


def _assignment(layer: Any, compressor: Any, level: Any) -> Assignment:
    if type(level) is list and 2 <= len(level) <= MOST_BLOCKS and all(type(one) is int for one in level):
        level = tuple(level)
    fits = level is None or type(level) in (int, tuple) or (type(level) is float and math.isfinite(level))
    if type(layer) is not str or type(compressor) is not str or not fits:
        raise TypeError(f"assignment {layer!r}, {compressor!r}, {level!r}")
    return Assignment(layer, compressor, level)


def manifest(layers: Sequence[LayerSpec]) -> str:
    """Returns canonical text of the layers: name, shape, dtype, in order."""
    return json.dumps(
        [[layer.name, list(layer.shape), layer.dtype] for layer in layers], separators=(",", ":")
    )


# ---- words for plans: a log may be read where the package of a compressor is not installed, so names of
# ---- compressors are derived from their string forms; only the unit of a level needs the compressor


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
            # Equal fields belong to different nested compressors.
            named.update(zip(members, members, strict=True))
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
