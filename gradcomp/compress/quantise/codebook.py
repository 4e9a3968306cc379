"""Codebook quantises to levels that the user gives, such as learned ones (Markov 2024, section 5.6)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np

from gradcomp.compress.base import Traits
from gradcomp.compress.bounds import ANY_LAYER, Distortion, check_feedback_around, of_magnitudes
from gradcomp.compress.quantise.bucketed import (
    WHOLE_LAYER,
    Bucketed,
    check_bucket_size,
    check_feedback,
    check_word,
)
from gradcomp.compress.registry import register
from gradcomp.core.errors import ConfigError
from gradcomp.core.layers import LayerSpec
from gradcomp.kernels.codec import Codec, Table
from gradcomp.kernels.segments import CODEBOOK_L2, CODEBOOK_LINF, MAGNITUDES_SHAPE, Magnitudes

KINDS = {"l2": CODEBOOK_L2, "linf": CODEBOOK_LINF}
ROUNDINGS = ("stochastic", "nearest")


@register("codebook")
@dataclass(frozen=True)
class Codebook(Bucketed):
    """Quantise to a sign and one of the given levels, in units of the bucket's norm.

    |v_i| / ||v|| is rounded to 0 or one of ``levels``; value = sign(v_i) ||v|| level.

    ``levels``: 1 to 127 numbers in (0, 1], ascending (as float32 too), the last one 1: every value must lie between two
    levels, or rounding could not be unbiased. 2^(b-1) - 1 levels use all codes of b bits; any other number leaves codes
    unused. In a string form they are separated by "/": ``"codebook:levels=0.125/0.25/0.5/1"``.
    ``scaling``: the norm, ``"linf"`` (default: the largest magnitude) or ``"l2"``.
    ``bucket_size``: values that share a norm; None: the whole layer.
    ``rounding="stochastic"`` (default): to the upper level with probability (v - lower) / (upper - lower), unbiased.
    ``"nearest"``: biased, ties to the lower level; ``feedback`` is then on by default.
    Wire, per direction: ceil(n b / 8) bytes of codes and 4 bytes per bucket; two rounds under
    scatter-reduce-allgather. The levels are part of the plan and are not sent.
    State: with feedback, a residual per layer and the chunk owner's server-side error.
    Errors: ConfigError for invalid levels, a bucket size below 1, unknown words; for feedback that would diverge, or
    never send anything.
    Source: Markov 2024, section 2.2.3 (QSGD as a codebook) and 5.6 (levels learned by Algorithm 5.1). Differs: the
    mean that is sent back has the same levels; this class does not learn them.
    """

    levels: tuple[float, ...]
    bucket_size: int | None = 512
    scaling: str = "linf"
    rounding: str = "stochastic"
    feedback: bool | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "levels", _checked(self.levels))
        check_bucket_size(self.bucket_size)
        check_word("scaling", self.scaling, KINDS)
        check_word("rounding", self.rounding, ROUNDINGS)
        check_feedback(self.feedback, or_none=True)
        if self.traits.keeps_residual:
            check_feedback_around(self.to_string(), self.distortion(ANY_LAYER))

    def distortion(self, layer: LayerSpec) -> Distortion:
        elements = min(self.bucket_size or WHOLE_LAYER, layer.size)
        return of_magnitudes(
            self.levels, elements, l2=self.scaling == "l2", nearest=self.rounding == "nearest"
        )

    @cached_property
    def traits(self) -> Traits:
        """Return a residual as ``feedback`` says; by default there is one where rounding is biased."""
        return Traits(
            keeps_residual=self.rounding == "nearest" if self.feedback is None else self.feedback,
            reduces=True,
        )

    @property
    def code_bits(self) -> int:
        """Return one bit for the sign, and enough bits for zero and every level."""
        return 1 + len(self.levels).bit_length()

    def codec_for(self, table: Table) -> Codec:
        return Codec(KINDS[self.scaling], self.rounding == "stochastic", _magnitudes(self.levels))


@cache
def _magnitudes(levels: tuple[float, ...]) -> Magnitudes:
    """Return a table with the levels in the row of their number of bits; the last one is repeated."""
    bits = 1 + len(levels).bit_length()
    magnitudes = np.zeros(MAGNITUDES_SHAPE, np.float32)
    magnitudes[bits, 1 : 1 + len(levels)] = levels
    magnitudes[bits, 1 + len(levels) : 1 << (bits - 1)] = 1
    magnitudes.flags.writeable = False
    return magnitudes


def _checked(levels: Any) -> tuple[float, ...]:
    numbers = tuple(levels) if isinstance(levels, Sequence) and not isinstance(levels, str) else (levels,)
    known = all(isinstance(x, int | float) and not isinstance(x, bool) and 0 < x <= 1 for x in numbers)
    if known and 1 <= len(numbers) <= 127:
        exact = np.array((0, *numbers), np.float32)
        # Subnormal float32 numbers have too few digits to interpolate between two levels.
        if exact[-1] == 1 and exact[1] >= np.finfo(np.float32).tiny and (np.diff(exact) > 0).all():
            return tuple(float(x) for x in numbers)
    raise ConfigError(f"levels must be 1 to 127 ascending numbers in (0, 1], the last one 1, got {levels!r}")
