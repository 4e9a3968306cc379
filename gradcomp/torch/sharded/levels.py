"""Learned levels of a unit's layers, from the values of all ranks (Markov 2024, sections 5.6.2 and C.3)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from gradcomp.compress import Codebook, Compressor
from gradcomp.compress.quantise.learned import SMALL, Doubles, exact_levels, learned, normalised, with_levels
from gradcomp.core.errors import ConfigError, StateError, WireFormatError
from gradcomp.core.layers import LayerSpec
from gradcomp.exchange.exchanger import Exchanger
from gradcomp.exchange.requests import ALL_GATHER, REDUCE_SCATTER, Array, Request

KINDS = (ALL_GATHER, REDUCE_SCATTER)


def codebook_of(kind: str, layer: LayerSpec, compressor: Compressor) -> Codebook | None:
    """Return the compressor with levels to be learned; None if the layer is small, or the compressor has none."""
    return with_levels(compressor, unbiased=kind == REDUCE_SCATTER) if layer.size > SMALL else None


def check_points(learn_levels: Any, *, has_optimizer: bool) -> bool:
    """Return whether levels are to be learned; ConfigError unless the steps ascend and can be counted."""
    points = list(learn_levels) if isinstance(learn_levels, Sequence) else [-1]
    whole = all(type(point) is int and point >= 0 for point in points)
    if not whole or any(a >= b for a, b in pairwise(points)):
        raise ConfigError(
            f"learn_levels must be ascending numbers of steps, such as (400, 1900, 3800), got {learn_levels!r}"
        )
    if points and not has_optimizer:
        raise ConfigError("learn_levels counts the steps of the optimizer: pass optimizer=")
    return bool(points)


class Learned(NamedTuple):
    """The levels that one rank has learned for a layer from so many values, after ``passed`` points."""

    layer: str
    passed: int
    codebook: Codebook
    values: int
    levels: Doubles


@dataclass(eq=False)
class UnitLevels:
    """Levels of one unit: those of weights and those of gradients, for each layer of more than 100,000 elements.

    They are learned in the first complete exchange after ``points`` steps of the optimizer. Each rank learns from its
    own shard of the weights, and from its own gradient there. The levels are then averaged, with the number of values
    that they were learned from as weights, in rank order and in float64: all ranks compute the same bits.

    Wire: 8 bytes for each level and 8 more for each layer, from every rank to every other, once for each point.
    """

    points: Sequence[int]
    #: Kind and layer -> how many points have passed, and the levels.
    found: dict[tuple[str, str], tuple[int, tuple[float, ...]]] = field(default_factory=dict)
    _next: dict[tuple[str, str], tuple[int, tuple[float, ...]]] = field(default_factory=dict)

    def compressor(self, kind: str, layer: LayerSpec, chosen: Compressor) -> Compressor:
        """Return the compressor with the levels that were learned; the given one before that."""
        if (found := self.found.get((kind, layer.name))) is None:
            return chosen
        codebook = codebook_of(kind, layer, chosen)
        assert codebook is not None, "levels were learned for it, or fit it when they were loaded"
        return replace(codebook, levels=found[1])

    def learn(
        self, request: Request, given: Array, rank: int, world: int, steps: int | None
    ) -> list[Learned]:
        """Return what this rank learns for the layers whose levels are due; it does not change any.

        ``given``: this rank's block of shards, or with gradients the blocks of all ranks. The exchange may write to it.
        """
        kind, passed = request.kind, bisect_right(self.points, -1 if steps is None else steps)
        if not passed:
            return []
        known, learnt = self.found | self._next, []
        blocks, borders = request.blocks, request.shards(world)
        for i, (layer, compressor) in enumerate(zip(request.layers, request.compressors, strict=True)):
            done, _ = known.get((kind, layer.name), (0, ()))
            if done >= passed or (codebook := codebook_of(kind, layer, compressor)) is None:
                continue
            assert blocks is not None, "fully_shard gathers and reduces blocks"
            block = given if kind == ALL_GATHER else given.reshape(-1, blocks.size)[rank]
            begin, length = blocks.offsets[i], borders[i][rank + 1] - borders[i][rank]
            with np.errstate(invalid="ignore"):  # values may not be finite; what they teach is not used then
                values = normalised(block[begin : begin + length].astype(np.float32), codebook.bucket_size)
                own = learned(values, codebook.levels, pinned=codebook.rounding == "stochastic")
            learnt.append(Learned(layer.name, passed, codebook, len(values), own))
        return learnt

    def agree(self, exchanger: Exchanger, kind: str, learnt: Sequence[Learned]) -> None:
        """Average over ranks what they have learned of an exchange, to be used from the next step on. Collective."""
        numbers = np.concatenate([np.append(each.levels, each.values) for each in learnt])
        everyone = exchanger.allgather_bytes(numbers.tobytes())
        if len({len(each) for each in everyone}) > 1:
            raise WireFormatError("the ranks have learned different numbers of levels")
        table = np.array([np.frombuffer(each) for each in everyone])
        at = 0
        for each in learnt:
            end = at + len(each.levels)
            levels = _mean(table[:, at:end], table[:, end], each.codebook)
            self._next[kind, each.layer] = each.passed, levels
            at = end + 1

    def adopt(self) -> set[str]:
        """Use what was learned in the last step; return the kinds of exchange that change."""
        changed = {kind for kind, _ in self._next}
        self.found |= self._next
        self._next = {}
        return changed

    def state(self) -> dict[str, dict[str, list[Any]]]:
        """Return how many points have passed, and the levels, by kind and layer."""
        return {
            kind: {
                name: [passed, list(levels)]
                for (of, name), (passed, levels) in self.found.items()
                if of == kind
            }
            for kind in KINDS
        }

    def load(self, state: Any, chosen: Mapping[tuple[str, str], tuple[LayerSpec, Compressor]]) -> None:
        """Restore :meth:`state`. ``chosen``: layers and compressors before learning.

        Raises StateError, and changes nothing, if they are not of this model and these compressors.
        """
        found = {}
        try:
            for kind, by_name in state.items():
                for name, (passed, levels) in by_name.items():
                    codebook = codebook_of(kind, *chosen[kind, name])
                    if codebook is None or type(passed) is not int or len(levels) != len(codebook.levels):
                        raise ValueError(f"{name!r} has other compression")
                    found[kind, name] = passed, replace(codebook, levels=tuple(levels)).levels
        except (AttributeError, KeyError, TypeError, ValueError, ConfigError) as error:
            raise StateError(f"the state has levels that do not fit this compression: {error}") from error
        self.found, self._next = found, {}


def _mean(levels: Any, counts: Any, codebook: Codebook) -> tuple[float, ...]:
    """Return the mean over ranks, rows of ``levels``, as ascending float32 numbers."""
    if not counts.sum():
        return codebook.levels
    total = np.zeros(levels.shape[1])
    # In rank order, whatever NumPy's own order of sums is.
    for count, row in zip(counts, levels, strict=True):
        total += count * row
    return exact_levels(total / counts.sum())
