"""Finds ranges of levels that are too short: most chosen levels are at an end of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gradcomp.compress import Compressor
from gradcomp.control.candidates import CandidateLevels

Numbers = npt.NDArray[np.int64]

#: A range is too short if more than this fraction of a family's elements is at one end of it.
MOST = 0.5


@dataclass(frozen=True, eq=False)
class End:
    """The ``rows`` of a compressor family at one end of its range; ``share`` is their fraction of its elements."""

    family: str
    low: bool
    share: float
    rows: Numbers

    @property
    def words(self) -> str:
        side = "lowest" if self.low else "highest"
        return f"{self.share:.0%} of the elements under {self.family} have the {side} level of their range"


def crowded_ends(candidates: CandidateLevels, current: Numbers) -> list[End]:
    """Returns the ends that hold more than half of a family's elements.

    A layer counts for the family of its current compressor, at an end of that family's levels among the layer's
    choices. A layer with only one level of the family is at neither end.
    """
    elements: dict[str, int] = {}
    at: dict[tuple[str, bool], list[int]] = {}
    ranges = _Ranges(candidates)
    for row, k in enumerate(current.tolist()):
        chosen, size = candidates.choices[row][k], candidates.specs[row].size
        family = _family(chosen)
        elements[family] = elements.get(family, 0) + size
        least, most = ranges.of(row, family)
        for low, level in ((True, least), (False, most)):
            if least < most and chosen.level == level:
                at.setdefault((family, low), []).append(row)
    ends = []
    for (family, low), rows in sorted(at.items()):
        share = sum(candidates.specs[row].size for row in rows) / max(elements[family], 1)
        if share > MOST:
            ends.append(End(family, low, share, np.array(rows, dtype=np.int64)))
    return ends


def goes_on(end: End, candidates: CandidateLevels, wider: CandidateLevels) -> bool:
    """Returns true if some layer at this end has a level beyond it in its ``wider`` range."""
    here, there = _Ranges(candidates), _Ranges(wider)
    side = 0 if end.low else 1
    for row in end.rows.tolist():
        inner, outer = here.of(row, end.family)[side], there.of(row, end.family)[side]
        if outer < inner if end.low else outer > inner:
            return True
    return False


class _Ranges:
    """The lowest and highest level of a family among a row's choices, computed once for layers of one shape."""

    def __init__(self, candidates: CandidateLevels) -> None:
        self._choices = candidates.choices
        self._found: dict[tuple[int, str], tuple[float, float]] = {}

    def of(self, row: int, family: str) -> tuple[float, float]:
        """Returns the lowest and highest level, or (0, 0) if the row has no level of the family."""
        choices = self._choices[row]
        key = (id(choices), family)
        if key not in self._found:
            levels = [c.level for c in choices if _family(c) == family]
            numbers = [float(level) for level in levels if isinstance(level, int | float)]
            self._found[key] = (min(numbers), max(numbers)) if numbers else (0.0, 0.0)
        return self._found[key]


def _family(compressor: Compressor) -> str:
    """Returns the names from the outermost wrapper to the innermost compressor."""
    inner = getattr(compressor, "inner", None)
    return compressor.name if inner is None else f"{compressor.name}[{_family(inner)}]"
