"""The plan assigns a compressor and a level to every layer."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from gradcomp.core.errors import ConfigError, WireFormatError
from gradcomp.core.layers import LayerSpec

#: The level of a layer, or of each of its blocks of rows.
Level = int | float | None | tuple[int, ...]

#: The largest number of blocks of a layer.
MOST_BLOCKS = 256


@dataclass(frozen=True)
class Assignment:
    """One layer's entry: ``compressor`` is the string form without its level, ``level`` the level.

    A tuple has a level for each block of rows: see :mod:`gradcomp.compress.blocks`. In JSON it is a list.
    ``built`` is the compressor itself where it is known, so that nobody has to parse its text; it is no part of the
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
