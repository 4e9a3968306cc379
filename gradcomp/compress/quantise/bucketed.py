"""Bucketed is the base of NUQSGD, Codebook, TernGrad and BlockFloat: their quantisation buckets share a scale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any, ClassVar

import numpy as np

from gradcomp.compress.base import Coded, Traits
from gradcomp.compress.bounds import ANY_LAYER, Distortion, check_feedback_around, of_levels, of_magnitudes
from gradcomp.compress.checks import check_flag, check_whole, check_word
from gradcomp.compress.registry import register
from gradcomp.core.errors import ConfigError
from gradcomp.core.layers import LayerSpec
from gradcomp.core.plan import Level
from gradcomp.kernels import segments
from gradcomp.kernels.codec import Codec, Table
from gradcomp.kernels.quantisers import FORMATS
from gradcomp.kernels.segments import MAGNITUDES_SHAPE, Magnitudes

#: This bucket size stands for a whole layer: no quantisation bucket can be larger.
WHOLE_LAYER = 2**31 - 1

KINDS = {"l2": segments.CODEBOOK_L2, "linf": segments.CODEBOOK_LINF}
_CODEBOOKS = KINDS | {"minmax": segments.CODEBOOK_MINMAX}
ROUNDINGS = ("stochastic", "nearest")
_FORMATS = {"fp8_e4m3": segments.E4M3, "fp8_e5m2": segments.E5M2, "fp4_e2m1": segments.E2M1}
_CODECS = {("e8m0", name): codec for name, codec in _FORMATS.items()} | {("e4m3", "fp4_e2m1"): segments.NVFP4}
SCALES = ("e8m0", "e4m3")


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


class Rounded(Bucketed):
    """Base of the bucketed compressors whose rounding may be biased, and then keeps a residual by default."""

    rounding: str
    feedback: bool | None

    def check_rounding(self) -> None:
        """Check the fields of this class. Of the other fields the bound on the error must be known."""
        check_word("rounding", self.rounding, ROUNDINGS)
        check_flag("feedback", self.feedback, or_none=True)
        if self.traits.keeps_residual:
            check_feedback_around(self.to_string(), self.distortion(ANY_LAYER))

    @cached_property
    def traits(self) -> Traits:
        return Traits.of_rounding(self.rounding, self.feedback)


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
class NUQSGD(Rounded):
    """Quantise to a sign and a power of two, in units of the bucket's norm.

    |v_i| / ||v|| is rounded to one of the levels 0, 2^-(s-1), ..., 1/4, 1/2, 1, where b bits give
    s = 2^(b-1) - 1 levels, and 0; value = sign(v_i) ||v|| level. Most values are far smaller than the norm, and
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
        check_whole("bits", self.bits, 2, 8)
        check_whole("bucket_size", self.bucket_size, 1, WHOLE_LAYER, or_none=True)
        check_word("scaling", self.scaling, KINDS)
        self.check_rounding()

    def distortion(self, layer: LayerSpec) -> Distortion:
        s = (1 << (self.bits - 1)) - 1
        elements = min(self.bucket_size or WHOLE_LAYER, layer.size)
        levels = [2.0**-i for i in reversed(range(s))]
        return of_magnitudes(levels, elements, l2=self.scaling == "l2", nearest=self.rounding == "nearest")

    def fill(self, table: Table, level: Level) -> None:
        check_whole("bits", level, 2, 8)
        super().fill(table, level)

    def codec_for(self, table: Table) -> Codec:
        """Return a codebook of powers of two; the number of bits is in the segment table."""
        return Codec(KINDS[self.scaling], self.rounding == "stochastic", _MAGNITUDES)


@register("codebook")
@dataclass(frozen=True)
class Codebook(Rounded):
    """Quantise to the given levels, in units of the bucket's norm or between its minimum and maximum.

    ``scaling="linf"`` (default: the largest magnitude) or ``"l2"``
        |v_i| / ||v|| is rounded to 0 or one of ``levels``; value = sign(v_i) ||v|| level. ``levels``: 1 to 127 numbers
        in (0, 1], ascending (as float32 too), the last one 1: every value must lie between two levels, or rounding
        could not be unbiased. 2^(b-1) - 1 levels use all codes of b bits. 4 bytes of scale per bucket.
    ``scaling="minmax"``
        lo, hi = min, max of the bucket; (v_i - lo) / (hi - lo) is rounded to one of ``levels``;
        value = lo + (hi - lo) level. ``levels``: 2 to 128 numbers in [0, 1], none below the one before it. Stochastic
        rounding needs 0 as the first level and 1 as the last one; to nearest, a value outside of all levels gets the
        first or the last one. 2^b levels use all codes of b bits, from 1 to 7. 8 bytes of scale per bucket.

    Any other number of levels leaves codes unused. In a string form levels are separated by "/":
    ``"codebook:levels=0.125/0.25/0.5/1"``.
    ``bucket_size``: values that share a scale; None: the whole layer.
    ``rounding="stochastic"`` (default): to the upper level with probability (v - lower) / (upper - lower), unbiased.
    ``"nearest"``: biased, ties to the lower level; ``feedback`` is then on by default.
    Wire, per direction: ceil(n b / 8) bytes of codes and the scales; two rounds under scatter-reduce-allgather. The
    levels are part of the plan and are not sent.
    State: with feedback, a residual per layer and the chunk owner's server-side error.
    Errors: ConfigError for invalid levels, a bucket size below 1, unknown words; for feedback that would diverge, or
    never send anything.
    Source: Markov 2024, section 2.2.3 (QSGD as a codebook) and 5.6.2 (levels between minimum and maximum, which
    ``compress_fsdp`` learns). Differs: the mean that is sent back has the same levels; this class does not learn them.
    """

    levels: tuple[float, ...]
    bucket_size: int | None = 512
    scaling: str = "linf"
    rounding: str = "stochastic"
    feedback: bool | None = None

    def __post_init__(self) -> None:
        check_word("scaling", self.scaling, _CODEBOOKS)
        check_word("rounding", self.rounding, ROUNDINGS)
        checked = (
            _checked_between(self.levels, self.rounding)
            if self.scaling == "minmax"
            else _checked(self.levels)
        )
        object.__setattr__(self, "levels", checked)
        check_whole("bucket_size", self.bucket_size, 1, WHOLE_LAYER, or_none=True)
        self.check_rounding()

    def distortion(self, layer: LayerSpec) -> Distortion:
        elements, nearest = min(self.bucket_size or WHOLE_LAYER, layer.size), self.rounding == "nearest"
        if self.scaling == "minmax":
            return of_levels(self.levels, elements, nearest=nearest)
        return of_magnitudes(self.levels, elements, l2=self.scaling == "l2", nearest=nearest)

    @property
    def code_bits(self) -> int:
        """Return enough bits for every level; for magnitudes also for zero, and one for the sign."""
        if self.scaling == "minmax":
            return (len(self.levels) - 1).bit_length()
        return 1 + len(self.levels).bit_length()

    def codec_for(self, table: Table) -> Codec:
        entries = self.levels if self.scaling == "minmax" else (0.0, *self.levels)
        return Codec(_CODEBOOKS[self.scaling], self.rounding == "stochastic", _table(entries, self.code_bits))


@cache
def _table(entries: tuple[float, ...], bits: int) -> Magnitudes:
    """Return a table with the entries in the row of their number of bits; the last one is repeated."""
    magnitudes = np.zeros(MAGNITUDES_SHAPE, np.float32)
    magnitudes[bits] = entries[-1]
    magnitudes[bits, : len(entries)] = entries
    magnitudes.flags.writeable = False
    return magnitudes


def _numbers(levels: Any, least: int) -> tuple[float, ...]:
    """Return the levels as a tuple; an empty one unless they are ``least`` or more numbers in [0, 1]."""
    numbers = tuple(levels) if isinstance(levels, Sequence) and not isinstance(levels, str) else (levels,)
    known = all(isinstance(x, int | float) and not isinstance(x, bool) and 0 <= x <= 1 for x in numbers)
    return tuple(float(x) for x in numbers) if known and least <= len(numbers) < 127 + least else ()


def _checked_between(levels: Any, rounding: str) -> tuple[float, ...]:
    numbers = _numbers(levels, 2)
    if numbers:
        exact = np.array(numbers, np.float32)
        pinned = rounding == "nearest" or (exact[0] == 0 and exact[-1] == 1)
        if pinned and (np.diff(exact) >= 0).all() and (exact[exact > 0] >= np.finfo(np.float32).tiny).all():
            return numbers
    ends = "" if rounding == "nearest" else ", the first one 0 and the last one 1"
    raise ConfigError(
        f"levels between minimum and maximum must be 2 to 128 ascending numbers in [0, 1]{ends}, got {levels!r}"
    )


def _checked(levels: Any) -> tuple[float, ...]:
    numbers = _numbers(levels, 1)
    if numbers:
        exact = np.array((0, *numbers), np.float32)
        # Subnormal float32 numbers have too few digits to interpolate between two levels.
        if exact[-1] == 1 and exact[1] >= np.finfo(np.float32).tiny and (np.diff(exact) > 0).all():
            return numbers
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
        check_whole("bucket_size", self.bucket_size, 1, WHOLE_LAYER, or_none=True)

    def distortion(self, layer: LayerSpec) -> Distortion:
        elements = min(self.bucket_size or WHOLE_LAYER, layer.size)
        return of_magnitudes((1.0,), elements, l2=False, nearest=False)

    @property
    def code_bits(self) -> int:
        """Return 2: a sign, and a magnitude of 0 or 1."""
        return 2

    def codec_for(self, table: Table) -> Codec:
        """Return a codec of even steps of the largest magnitude, of which two bits leave one."""
        return Codec(segments.LINF, stochastic=True)


@register("block_float")
@dataclass(frozen=True)
class BlockFloat(Rounded):
    """Round every value to a narrow floating format, in units of a scale that a block of values shares.

    value_i = X P_i; P_i is v_i / X in the format, subnormal numbers included, and P_max its largest number.
    ``scale="e8m0"`` (default): X = 2^ceil(log2(max |v| / P_max)), the least power of two with no |v_i| / X above P_max.
    ``scale="e4m3"``: X = S s, s the least number of E4M3 with no |v_i| / X above P_max, S = max |v| / (448 P_max),
    where the maximum is that of the layer's part within a chunk. With ``block=16`` this is NVFP4.

    ``format``: ``"fp8_e4m3"`` (default: P_max = 448), ``"fp8_e5m2"`` (57344) or ``"fp4_e2m1"`` (6).
    ``block``: values that share X; None: the whole layer.
    ``rounding="stochastic"`` (default): to one of the two neighbouring numbers, unbiased. ``"nearest"``: ties to even,
    biased; ``feedback`` is then on by default.
    Wire, per direction: 1 or half a byte per value and 1 byte per block, 8.25 and 4.25 bits per value at 32; with
    ``scale="e4m3"`` also 4 bytes for S, 4.5 bits per value at 16. Two rounds under scatter-reduce-allgather.
    State: with feedback, a residual per layer and the chunk owner's server-side error.
    Errors: ConfigError for an unknown word, a block below 1, or ``scale="e4m3"`` with a format of 8 bits. Under E8M0,
    values above 1.75 x 2^127 (1.5 x 2^127 for fp4_e2m1) count as not finite.
    Source: OCP Microscaling Formats (MX) Specification 1.0, sections 5 and 6 (E4M3, E5M2, E2M1; scale E8M0; block 32);
    NVIDIA 2025, Pretraining Large Language Models with NVFP4 (scale E4M3 in two levels; block 16).
    Differs: X is rounded up, so that no value is clamped and stochastic rounding has no bias (section 6.3 takes
    2^floor(log2 max |v|) over the largest power of two of the format, and clamps; NVFP4 rounds s to nearest); X is at
    least 2^-126, s at least 2^-9; codes that a format reserves for infinities and NaN are never sent. S is not that of
    the whole tensor: it depends on the slice size and the order of layers.
    """

    format: str = "fp8_e4m3"
    block: int | None = 32
    rounding: str = "stochastic"
    feedback: bool | None = None
    scale: str = "e8m0"

    def __post_init__(self) -> None:
        check_word("format", self.format, _FORMATS)
        check_whole("block", self.block, 1, WHOLE_LAYER, or_none=True)
        check_word("scale", self.scale, SCALES)
        if (self.scale, self.format) not in _CODECS:
            raise ConfigError(f"scale=e4m3 needs format=fp4_e2m1, got {self.format}")
        self.check_rounding()

    @property
    def bucket_size(self) -> int | None:  # type: ignore[override]
        """Return ``block``, the number of values that share a scale."""
        return self.block

    def alternatives(self) -> tuple[BlockFloat, ...]:
        """Return this compressor with 8 bits, with its own format, and with 4 bits."""
        formats = dict.fromkeys(("fp8_e4m3", self.format, "fp4_e2m1"))
        return tuple(
            replace(self, format=each, scale=self.scale if (self.scale, each) in _CODECS else "e8m0")
            for each in formats
        )

    def distortion(self, layer: LayerSpec) -> Distortion:
        """Bound the error for d values in a block, and a format with m bits of mantissa and the smallest number f.

        Normal numbers of the format are at most 2^-m |v| apart; the variance is at most a quarter of that squared.
        Below them it is at most (f X)^2 / 4. Under E8M0, max |v| > P_max X / 2. Under E4M3, X is at most 9/8 max |v| /
        P_max, or max |v| / P_max + 2^-9 S where s is subnormal. To nearest, the error is at most half the distance.
        """
        form = FORMATS[_FORMATS[self.format]]
        elements = min(self.block or WHOLE_LAYER, layer.size)
        smallest = float(form.magnitude(1) / form.largest)
        if self.scale == "e8m0":
            below = (elements - 1) * smallest**2
        else:
            of_unit = 2.0**-9 * smallest / float(FORMATS[segments.E4M3].largest)
            below = (elements * smallest**2 + layer.size * of_unit**2) / 2
        bound = 4.0 ** -(form.mantissa + 1) + below
        step = max(2.0**-form.mantissa, 2 * smallest)
        nearest = self.rounding == "nearest"
        return Distortion(bound, not nearest, step / 2 if nearest else step)

    @property
    def code_bits(self) -> int:
        return segments.LEVELS[_FORMATS[self.format]].start

    def codec_for(self, table: Table) -> Codec:
        return Codec(_CODECS[self.scale, self.format], self.rounding == "stochastic")
