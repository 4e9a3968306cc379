"""NUQSGD quantises to exponentially spaced levels (Ramezani-Kebrya et al. 2021)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

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
from gradcomp.compress.quantise.codebook import KINDS, ROUNDINGS
from gradcomp.compress.registry import register
from gradcomp.core.errors import ConfigError
from gradcomp.core.layers import LayerSpec
from gradcomp.core.plan import Level
from gradcomp.kernels.codec import Codec, Table
from gradcomp.kernels.segments import MAGNITUDES_SHAPE, Magnitudes


def _exponential() -> Magnitudes:
    """Return 0, 2^-(s-1), ..., 1/2, 1 for all numbers of bits; 8 bits reach float32's smallest normal number."""
    magnitudes = np.zeros(MAGNITUDES_SHAPE, np.float32)
    for bits in range(2, 9):
        s = (1 << (bits - 1)) - 1
        magnitudes[bits, 1 : s + 1] = np.ldexp(1.0, np.arange(1 - s, 1))
    magnitudes.flags.writeable = False
    return magnitudes


_MAGNITUDES = _exponential()


@register("nuqsgd")
@dataclass(frozen=True)
class NUQSGD(Bucketed):
    """Quantise to a sign and a power of two, in units of the bucket's norm.

    |v_i| / ||v|| is rounded to one of the levels 0, 2^-(s-1), ..., 1/4, 1/2, 1, where b bits give
    s = 2^(b-1) - 1 levels beside 0; value = sign(v_i) ||v|| level. Most values are far smaller than the norm, and
    these levels are close together there.

    ``bits``: b, from 2 to 8. ``bucket_size``: values that share a norm; None: the whole layer.
    ``scaling``: ``"l2"`` (the paper's) or ``"linf"``.
    ``rounding="stochastic"`` (default): to the upper level with probability (v - lower) / (upper - lower), unbiased.
    ``"nearest"``: biased, ties to the lower level; ``feedback`` is then on by default.
    Wire, per direction: ceil(n b / 8) bytes of codes and 4 bytes per bucket; two rounds under
    scatter-reduce-allgather.
    State: with feedback, a residual per layer and the chunk owner's server-side error.
    Errors: ConfigError for bits outside 2..8, a bucket size below 1, unknown words; for feedback that would diverge, or
    never send anything.
    Source: Ramezani-Kebrya et al. 2021, as cited in Markov 2024. Differs: codes have a fixed length, where the paper
    has codes of variable length; the mean over ranks is quantised again before it is sent back.
    """

    level_field: ClassVar[str | None] = "bits"

    bits: int = 4
    bucket_size: int | None = 512
    scaling: str = "l2"
    rounding: str = "stochastic"
    feedback: bool | None = None

    def __post_init__(self) -> None:
        _check_bits(self.bits)
        check_bucket_size(self.bucket_size)
        check_word("scaling", self.scaling, KINDS)
        check_word("rounding", self.rounding, ROUNDINGS)
        check_feedback(self.feedback, or_none=True)
        if self.traits.keeps_residual:
            check_feedback_around(self.to_string(), self.distortion(ANY_LAYER))

    def distortion(self, layer: LayerSpec) -> Distortion:
        s = (1 << (self.bits - 1)) - 1
        elements = min(self.bucket_size or WHOLE_LAYER, layer.size)
        levels = [2.0**-i for i in reversed(range(s))]
        return of_magnitudes(levels, elements, l2=self.scaling == "l2", nearest=self.rounding == "nearest")

    @cached_property
    def traits(self) -> Traits:
        """Return a residual as ``feedback`` says; by default there is one where rounding is biased."""
        return Traits(
            keeps_residual=self.rounding == "nearest" if self.feedback is None else self.feedback,
            reduces=True,
        )

    def fill(self, table: Table, level: Level) -> None:
        _check_bits(level)
        super().fill(table, level)

    def codec_for(self, table: Table) -> Codec:
        """Return a codebook of powers of two; the number of bits is in the segment table."""
        return Codec(KINDS[self.scaling], self.rounding == "stochastic", _MAGNITUDES)


def _check_bits(bits: Level) -> None:
    if isinstance(bits, bool) or not isinstance(bits, int) or not 2 <= bits <= 8:
        raise ConfigError(f"bits must be a whole number from 2 to 8, got {bits!r}")
