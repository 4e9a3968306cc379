"""Bucketed is the base of the compressors that quantise bucket by bucket: NUQSGD, Codebook and TernGrad."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, ClassVar

import numpy as np

from gradcomp.compress.base import Coded, Traits
from gradcomp.compress.bounds import ANY_LAYER, Distortion, check_feedback_around, of_magnitudes
from gradcomp.compress.registry import register
from gradcomp.core.errors import ConfigError
from gradcomp.core.layers import LayerSpec
from gradcomp.core.plan import Level
from gradcomp.kernels.codec import Codec, Table
from gradcomp.kernels.segments import CODEBOOK_L2, CODEBOOK_LINF, LINF, MAGNITUDES_SHAPE, Magnitudes

#: This bucket size stands for a whole layer: no quantisation bucket can be larger.
WHOLE_LAYER = 2**31 - 1

KINDS = {"l2": CODEBOOK_L2, "linf": CODEBOOK_LINF}
ROUNDINGS = ("stochastic", "nearest")


class Bucketed(Coded):
    """Base of the compressors whose quantisation buckets of ``bucket_size`` consecutive values share a scale record.

    None: all values of a layer share one. A layer is cut between quantisation buckets only, so with None it travels,
    and is added up, in one piece. The level, if there is one, is the number of bits of a code; otherwise that is
    ``code_bits``.
    """

    bucket_size: int | None

    @property
    def code_bits(self) -> int:
        """Return the bits of a code, for a compressor without a level."""
        return 1

    def fill(self, table: Table, level: Level) -> None:
        table["level"] = self.code_bits if level is None else level
        table["bucket_size"] = self.bucket_size or WHOLE_LAYER

    def cut_elements(self, layer: LayerSpec) -> int:
        """Return the bucket size, so that no cut changes a scale."""
        return self.bucket_size or WHOLE_LAYER


def check_bucket_size(size: int | None, name: str = "bucket_size") -> None:
    """Raise ConfigError unless the size is a whole number from 1 on, or None."""
    if size is None:
        return
    if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= WHOLE_LAYER:
        raise ConfigError(f"{name} must be a whole number of at least 1, or none, got {size!r}")


def check_word(name: str, word: str, words: Collection[str]) -> None:
    """Raise ConfigError unless ``word`` is one of ``words``."""
    if word not in words:
        raise ConfigError(f"{name} must be one of {', '.join(words)}, got {word!r}")


def check_feedback(feedback: bool | None, *, or_none: bool = False) -> None:
    """Raise ConfigError unless ``feedback`` is a bool, or None where that is allowed."""
    if not isinstance(feedback, bool) and not (or_none and feedback is None):
        raise ConfigError(
            f"feedback must be true{', false or none' if or_none else ' or false'}, got {feedback!r}"
        )


def _check_scaled(compressor: NUQSGD | Codebook) -> None:
    """Raise ConfigError for fields that quantisers to given magnitudes have in common."""
    check_bucket_size(compressor.bucket_size)
    check_word("scaling", compressor.scaling, KINDS)
    check_word("rounding", compressor.rounding, ROUNDINGS)
    check_feedback(compressor.feedback, or_none=True)
    if compressor.traits.keeps_residual:
        check_feedback_around(compressor.to_string(), compressor.distortion(ANY_LAYER))


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
        _check_scaled(self)

    def distortion(self, layer: LayerSpec) -> Distortion:
        s = (1 << (self.bits - 1)) - 1
        elements = min(self.bucket_size or WHOLE_LAYER, layer.size)
        levels = [2.0**-i for i in reversed(range(s))]
        return of_magnitudes(levels, elements, l2=self.scaling == "l2", nearest=self.rounding == "nearest")

    @cached_property
    def traits(self) -> Traits:
        return Traits.of_rounding(self.rounding, self.feedback)

    def fill(self, table: Table, level: Level) -> None:
        _check_bits(level)
        super().fill(table, level)

    def codec_for(self, table: Table) -> Codec:
        """Return a codebook of powers of two; the number of bits is in the segment table."""
        return Codec(KINDS[self.scaling], self.rounding == "stochastic", _MAGNITUDES)


def _check_bits(bits: Level) -> None:
    if isinstance(bits, bool) or not isinstance(bits, int) or not 2 <= bits <= 8:
        raise ConfigError(f"bits must be a whole number from 2 to 8, got {bits!r}")


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
        _check_scaled(self)

    def distortion(self, layer: LayerSpec) -> Distortion:
        elements = min(self.bucket_size or WHOLE_LAYER, layer.size)
        return of_magnitudes(
            self.levels, elements, l2=self.scaling == "l2", nearest=self.rounding == "nearest"
        )

    @cached_property
    def traits(self) -> Traits:
        return Traits.of_rounding(self.rounding, self.feedback)

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


@register("terngrad")
@dataclass(frozen=True)
class TernGrad(Bucketed):
    """Round every value to -s, 0 or s, where s is the bucket's largest magnitude, without bias.

    Q(v_i) = s sign(v_i) b_i with s = ||v||_inf and P(b_i = 1) = |v_i| / s, so E[Q(v)] = v and no residual is needed.
    The mean over ranks is rounded in the same way before it is sent back.

    ``bucket_size``: values that share s; None: the whole layer, as in the paper.
    Wire, per direction: 2 bits per value and 4 bytes per bucket, 2.0625 bits per value at 512; two rounds under
    scatter-reduce-allgather.
    State: none.
    Errors: ConfigError for a bucket size below 1.
    Source: Markov 2024, section 2.2.3; Wen et al. 2017, as cited there. Differs: the default is a bucket of 512 values
    instead of a layer; codes are not packed as ternary digits (log2 3 = 1.58 bits); the paper's options, to clip
    gradients and to share scales among ranks, are left out.
    """

    bucket_size: int | None = 512

    def __post_init__(self) -> None:
        check_bucket_size(self.bucket_size)

    def distortion(self, layer: LayerSpec) -> Distortion:
        elements = min(self.bucket_size or WHOLE_LAYER, layer.size)
        return of_magnitudes((1.0,), elements, l2=False, nearest=False)

    @property
    def code_bits(self) -> int:
        """Return 2: a sign, and a magnitude of 0 or 1."""
        return 2

    def codec_for(self, table: Table) -> Codec:
        """Return a codec of even steps of the largest magnitude, of which two bits leave one."""
        return Codec(LINF, stochastic=True)
