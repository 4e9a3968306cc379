"""The quantising codecs in NumPy: they encode a segment's buckets as codes and scale records, and decode them.

This module is part of `reference`. Each codec is a :class:`Quantiser`: functions of float32 contributions c of shape
(buckets, elements), of draws u in (0, 1) of the same shape, and of the :class:`Level`. If u is None, codes are rounded
to nearest. For a shift all elements of u are equal, and in (-1/2, 1/2). Scale records are columns with one number per
bucket. A number is sent as float32 or as one byte, in the format E8M0 (the exponent of a power of two) or E4M3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from gradcomp.kernels.reference_memory import ordered_sum
from gradcomp.kernels.segments import (
    CODEBOOK_L2,
    CODEBOOK_LINF,
    CODEBOOK_MINMAX,
    E2M1,
    E4M3,
    E5M2,
    L2,
    LINF,
    MINMAX,
    MINMAX_SHIFT,
    NVFP4,
    ONEBIT,
    SIGN,
    VOTE,
    Bytes,
    Floats,
    Magnitudes,
)

Columns: TypeAlias = tuple[Floats, ...]


class Format(NamedTuple):
    """A float format: mantissa bits, exponents of the smallest and largest normal number, the largest number's code."""

    mantissa: int
    least: int
    most: int
    largest_code: int

    @property
    def largest(self) -> np.float32:
        return np.float32(self.magnitude(self.largest_code))

    def magnitude(self, code: Any) -> Floats:
        """Returns the magnitudes of codes without a sign; a code that the format reserves gives the next magnitude."""
        exponent = np.maximum(np.asarray(code, np.int32) >> self.mantissa, 1)
        steps = code - ((exponent - 1) << self.mantissa)
        magnitudes: Floats = np.ldexp(steps.astype(np.float32), exponent - 1 + self.least - self.mantissa)
        return magnitudes


FORMATS = {E4M3: Format(3, -6, 8, 0x7E), E5M2: Format(2, -14, 15, 0x7B), E2M1: Format(1, 0, 2, 0x7)}


def rounded_up(x: Floats) -> npt.NDArray[np.int32]:
    """Rounds x up to E4M3, and returns codes from 1 (the least code with an inverse) to the largest number's code."""
    form = FORMATS[E4M3]
    fewer = 23 - form.mantissa
    cut = (x.view(np.uint32) + np.uint32((1 << fewer) - 1)) >> np.uint32(fewer)
    normal = cut.astype(np.int32) - ((126 + form.least) << form.mantissa)
    border = np.float32(2.0**form.least)
    subnormal = np.ceil(np.fmin(x, border) * np.float32(2.0 ** (form.mantissa - form.least))).astype(np.int32)
    code = np.where(x < border, subnormal, normal)
    return np.clip(code, 1, form.largest_code).astype(np.int32)


class ScaleFormat(NamedTuple):
    """The format of a number in a scale record."""

    nbytes: int
    pack: Callable[[Floats], Bytes]
    unpack: Callable[[Bytes], Floats]


def _unpack_powers(source: Bytes) -> Floats:
    scales: Floats = np.ldexp(np.float32(1), np.minimum(source, 254).astype(np.int32) - 127)
    scales[source == 255] = np.nan
    return scales


def _unpack_e4m3(source: Bytes) -> Floats:
    form = FORMATS[E4M3]
    scales = form.magnitude(np.minimum(source, form.largest_code))
    scales[source > form.largest_code] = np.nan
    return scales


FLOAT32_SCALES = ScaleFormat(4, lambda scales: scales.view(np.uint8), lambda source: source.view("<f4"))
E8M0_SCALES = ScaleFormat(1, lambda scales: (np.frexp(scales)[1] + 126).astype(np.uint8), _unpack_powers)
"""Normal powers of two; 255 is NaN."""
E4M3_SCALES = ScaleFormat(1, lambda scales: rounded_up(scales).astype(np.uint8), _unpack_e4m3)
"""Non-negative E4M3 numbers; a code above that of the largest number, or with the sign bit set, is NaN."""


class Level(NamedTuple):
    """The bit width of a code, and the codebook's row for it. Scales are multiples of ``unit``."""

    bits: int
    magnitudes: Floats | None = None
    unit: np.float32 = np.float32(1)

    @staticmethod
    def of(segment: np.void, magnitudes: Magnitudes | None) -> Level:
        bits = int(segment["level"])
        return Level(bits, None if magnitudes is None else magnitudes[bits])


class Quantiser(NamedTuple):
    """The functions and the record format of a quantising codec."""

    columns: int  # the number of values in a bucket's scale record
    quantise: Callable[[Floats, Floats | None, Level], tuple[Columns, Bytes]]
    dequantise: Callable[[Bytes, Sequence[Floats], Level], Floats]
    #: Returns, per bucket, values that are all finite only if every code of the bucket decodes to a finite value.
    extremes: Callable[[Sequence[Floats], Level], Floats]
    scales: ScaleFormat = FLOAT32_SCALES
    #: Returns the unit of a segment's scales from its largest magnitude; None: scales have no unit.
    unit: Callable[[np.float32], np.float32] | None = None


# --- min-max ------------------------------------------------------------------------------------------------


def _quantise_minmax(c: Floats, u: Floats | None, level: Level) -> tuple[Columns, Bytes]:
    if level.bits == 1 and u is None:
        # One bit decodes to the mean of the negative values or to that of the others; extremes would be too far away.
        (low, high), negative = _quantise_onebit(c, None, level)
        return (low, high - low), negative ^ np.uint8(1)
    lo, unit, inverse = _steps(c, _most_steps(level))
    code = _round((c - lo[:, None]) * inverse[:, None], u, _most_steps(level))
    return (lo, unit), code


def _steps(c: Floats, levels: np.float32) -> Columns:
    """Returns minimum, unit and inverse unit of each bucket; the latter two are 0 in a constant bucket."""
    lo = c.min(axis=1) + np.float32(0)  # -0 becomes +0: which of the two a minimum returns is undefined
    hi = c.max(axis=1) + np.float32(0)
    span = hi - lo
    unit, inverse = span / levels, levels / span
    flat = ~np.isfinite(inverse)
    unit[flat], inverse[flat] = 0, 0
    return lo, unit, inverse


def _most_steps(level: Level) -> np.float32:
    return np.float32((1 << level.bits) - 1)


def _quantise_shifted(c: Floats, u: Floats | None, level: Level) -> tuple[Columns, Bytes]:
    """Rounds to nearest on a lattice that begins at lo + u unit; all codes are in 0..2^b - 1, up to rounding errors.

    If u is None, this is MINMAX rounded to nearest.
    """
    if u is None:
        return _quantise_minmax(c, None, level)
    lo, unit, inverse = _steps(c, _most_steps(level))
    lo = lo + u[:, 0] * unit
    code = _round((c - lo[:, None]) * inverse[:, None], None, _most_steps(level))
    lo[~np.isfinite(lo + _most_steps(level) * unit)] = np.nan  # the largest code would decode to infinity
    return (lo, unit), code


def _dequantise_minmax(code: Bytes, scales: Sequence[Floats], level: Level) -> Floats:  # noqa: ARG001
    lo, unit = scales
    value: Floats = lo + code.astype(np.float32) * unit
    return value


def _minmax_extremes(scales: Sequence[Floats], level: Level) -> Floats:
    lo, unit = scales
    return np.concatenate((lo, lo + _most_steps(level) * unit))


# --- sign and magnitude in equal steps of a norm ------------------------------------------------------------


def _quantise_by_norm(
    c: Floats, u: Floats | None, level: Level, norm_of: Callable[[Floats], Floats]
) -> tuple[Columns, Bytes]:
    if level.bits == 1 and u is None:
        # One bit is scaled by the mean magnitude, because the norm is far above most values.
        return _quantise_sign(c, None, level)
    s = np.float32(_largest_magnitude(level))
    norm, inverse = _divisible(norm_of(c), s)
    if level.bits == 1:
        assert u is not None, "one bit to nearest has a scale of its own"
        positive_probability = (c * inverse[:, None] + np.float32(1)) * np.float32(0.5)
        return (norm,), (~(u < positive_probability)).astype(np.uint8)
    magnitude = _round(np.abs(c) * inverse[:, None], u, s)
    return (norm,), _with_sign(magnitude, c, level)


def _dequantise_by_norm(code: Bytes, scales: Sequence[Floats], level: Level) -> Floats:
    (norm,) = scales
    s = _largest_magnitude(level)
    magnitude = (code & np.uint8(s)).astype(np.float32) if level.bits > 1 else np.float32(1)
    value: Floats = magnitude * (norm / np.float32(s))
    return np.where(code >> np.uint8(level.bits - 1), -value, value)


def _norm_extremes(scales: Sequence[Floats], level: Level) -> Floats:
    (norm,) = scales
    s = np.float32(_largest_magnitude(level))
    extremes: Floats = s * (norm / s)
    return extremes


def _largest_magnitude(level: Level) -> int:
    """Returns s, the largest magnitude of a signed code; a code of one bit is a sign, in units of the norm itself."""
    return max((1 << (level.bits - 1)) - 1, 1)


# --- levels from a codebook: a sign and a magnitude, or between minimum and maximum -----------------------------


def _quantise_by_codebook(
    c: Floats, u: Floats | None, level: Level, norm_of: Callable[[Floats], Floats]
) -> tuple[Columns, Bytes]:
    assert level.magnitudes is not None
    norm, inverse = _divisible(norm_of(c), np.float32(1))
    r = np.minimum(np.abs(c) * inverse[:, None], np.float32(1))
    return (norm,), _with_sign(_round_to_entry(level.magnitudes[: 1 << (level.bits - 1)], r, u), c, level)


def _round_to_entry(entries: Floats, r: Floats, u: Floats | None) -> Bytes:
    """Returns the numbers of the entries to which r rounds; none is below the first entry or above the last."""
    # entries[code] < r <= entries[code + 1], except for r = entries[0]; of equal entries the first is taken.
    code = np.searchsorted(entries[1:], np.nan_to_num(r), side="left")
    lower, upper = entries[code], entries[code + 1]
    above = upper - r < r - lower if u is None else u * (upper - lower) < r - lower
    return (code + above).astype(np.uint8)


def _dequantise_by_codebook(code: Bytes, scales: Sequence[Floats], level: Level) -> Floats:
    assert level.magnitudes is not None
    (norm,) = scales
    value: Floats = level.magnitudes[code & np.uint8((1 << (level.bits - 1)) - 1)] * norm
    return np.where(code >> np.uint8(level.bits - 1), -value, value)


def _quantise_between(c: Floats, u: Floats | None, level: Level) -> tuple[Columns, Bytes]:
    """Rounds (c - lo) / span to levels of the codebook; what lies outside of all levels gets the nearest one."""
    assert level.magnitudes is not None
    levels = level.magnitudes[: 1 << level.bits]
    lo, span, inverse = _steps(c, np.float32(1))
    r = np.clip((c - lo[:, None]) * inverse[:, None], levels[0], levels[-1])
    lo[~np.isfinite(lo + span)] = np.nan
    return (lo, span), _round_to_entry(levels, r, u)


def _dequantise_between(code: Bytes, scales: Sequence[Floats], level: Level) -> Floats:
    assert level.magnitudes is not None
    lo, span = scales
    value: Floats = lo + level.magnitudes[code] * span
    return value


def _ends(scales: Sequence[Floats], level: Level) -> Floats:  # noqa: ARG001
    lo, span = scales
    return np.concatenate((lo, lo + span))


# --- narrow floating formats whose values share a scale --------------------------------------------------------


def _quantise_block(c: Floats, u: Floats | None, level: Level, form: Format) -> tuple[Columns, Bytes]:
    norm = linf_norm(c)
    largest = np.ldexp(form.largest, -form.most)  # in [1, 2)
    fraction, exponent = np.frexp(np.where(np.isfinite(norm), norm, np.float32(1)))
    power = np.where(norm == 0, -126, exponent - 1 - form.most + (2 * fraction > largest)).astype(np.int32)
    power = np.maximum(power, -126)
    scale = _representable(np.ldexp(np.float32(1), power), norm, level, form)
    return (scale,), _format_codes(c, np.ldexp(np.float32(1), -power), u, level, form)


def _quantise_in_units(c: Floats, u: Floats | None, level: Level, form: Format) -> tuple[Columns, Bytes]:
    """Quantises with the least scale, an E4M3 number times the unit, at which no value exceeds the format's largest."""
    norm = linf_norm(c)
    least = norm * (np.float32(1) / (form.largest * level.unit))
    scale = FORMATS[E4M3].magnitude(rounded_up(least))
    codes = _format_codes(c, np.float32(1) / (scale * level.unit), u, level, form)
    return (_representable(scale, norm, level, form),), codes


_LEAST_UNIT = 2.0**-117
"""The least unit whose product with the least scale, 2^-9, is a normal number."""


def _unit(largest: np.float32, form: Format) -> np.float32:
    """Returns the unit of a segment's scales, at which the largest magnitude needs the largest scale."""
    unit = largest / (FORMATS[E4M3].largest * form.largest)
    return np.float32(_LEAST_UNIT) if unit < _LEAST_UNIT else unit


def _format_codes(c: Floats, inverse: Floats, u: Floats | None, level: Level, form: Format) -> Bytes:
    r = np.nan_to_num(np.abs(c) * inverse[:, None])
    # The exponent of r, but at least that of the smallest normal number.
    own = np.where(r > 0, np.maximum(np.frexp(r)[1] - 1, form.least), form.least)
    steps = _round(np.ldexp(r, form.mantissa - own), u, np.float32(2 << form.mantissa))
    code = ((own - form.least) << form.mantissa) + steps
    return _with_sign(np.minimum(code, form.largest_code).astype(np.uint8), c, level)


def _representable(scale: Floats, norm: Floats, level: Level, form: Format) -> Floats:
    """Returns the scale; NaN where the norm, or the value of the largest code, is not finite."""
    scale[~np.isfinite(norm)] = np.nan
    scale[~np.isfinite(_block_extremes((scale,), level, form))] = np.nan
    return scale


def _dequantise_block(code: Bytes, scales: Sequence[Floats], level: Level, form: Format) -> Floats:
    (scale,) = scales
    magnitude = form.magnitude(code & np.uint8((1 << (level.bits - 1)) - 1))
    value: Floats = magnitude * (scale * level.unit)
    return np.where(code >> np.uint8(level.bits - 1), -value, value)


def _block_extremes(scales: Sequence[Floats], level: Level, form: Format) -> Floats:
    extremes: Floats = form.magnitude((1 << (level.bits - 1)) - 1) * (scales[0] * level.unit)
    return extremes


def _of_format(
    form: Format,
    quantise: Callable[..., tuple[Columns, Bytes]],
    scales: ScaleFormat,
    unit: Callable[[np.float32], np.float32] | None = None,
) -> Quantiser:
    decoders = partial(_dequantise_block, form=form), partial(_block_extremes, form=form)
    return Quantiser(1, partial(quantise, form=form), *decoders, scales, unit)


# --- one bit ------------------------------------------------------------------------------------------------


def _quantise_sign(c: Floats, u: Floats | None, level: Level) -> tuple[Columns, Bytes]:  # noqa: ARG001
    scale = (ordered_sum(np.abs(c)) / np.float64(c.shape[1])).astype(np.float32)
    return (scale,), (c < 0).astype(np.uint8)


def _quantise_vote(c: Floats, u: Floats | None, level: Level) -> tuple[Columns, Bytes]:  # noqa: ARG001
    """Encodes signs as votes. A zero votes by its draw, with equal odds; in a bucket of only zeros no element votes."""
    present = (c != 0).any(axis=1)
    negative = c < 0
    if u is not None:
        negative |= (c == 0) & (u > np.float32(0.5)) & present[:, None]
    return (present.astype(np.float32),), negative.astype(np.uint8)


def _dequantise_sign(code: Bytes, scales: Sequence[Floats], level: Level) -> Floats:  # noqa: ARG001
    (scale,) = scales
    return np.where(code, -scale, scale)


def _quantise_onebit(c: Floats, u: Floats | None, level: Level) -> tuple[Columns, Bytes]:  # noqa: ARG001
    negative = c < 0
    means = []
    for side in (negative, ~negative):
        count = np.maximum(side.sum(axis=1), 1)  # a side without values has the mean 0
        means.append((ordered_sum(np.where(side, c, np.float32(0))) / count).astype(np.float32))
    return tuple(means), negative.astype(np.uint8)


def _dequantise_onebit(code: Bytes, scales: Sequence[Floats], level: Level) -> Floats:  # noqa: ARG001
    low, high = scales
    return np.where(code, low, high)


def _recorded(scales: Sequence[Floats], level: Level) -> Floats:  # noqa: ARG001
    """Returns the numbers of the scale records, which bound the magnitudes of all decoded values."""
    return np.concatenate(scales)


def l2_norm(c: Floats) -> Floats:
    """Returns the Euclidean norm of each row, from squares added in float64 in the order of `reference_memory`."""
    norm: Floats = np.sqrt(ordered_sum(np.square(c, dtype=np.float64))).astype(np.float32)
    return norm


def linf_norm(c: Floats) -> Floats:
    """Returns the largest magnitude of each row."""
    norm: Floats = np.abs(c).max(axis=1)
    return norm


_OF_NORM = _dequantise_by_norm, _norm_extremes
_OF_CODEBOOK = _dequantise_by_codebook, _recorded
QUANTISER: dict[int, Quantiser] = {
    MINMAX: Quantiser(2, _quantise_minmax, _dequantise_minmax, _minmax_extremes),
    MINMAX_SHIFT: Quantiser(2, _quantise_shifted, _dequantise_minmax, _minmax_extremes),
    L2: Quantiser(1, partial(_quantise_by_norm, norm_of=l2_norm), *_OF_NORM),
    LINF: Quantiser(1, partial(_quantise_by_norm, norm_of=linf_norm), *_OF_NORM),
    SIGN: Quantiser(1, _quantise_sign, _dequantise_sign, _recorded),
    VOTE: Quantiser(1, _quantise_vote, _dequantise_sign, _recorded),
    ONEBIT: Quantiser(2, _quantise_onebit, _dequantise_onebit, _recorded),
    CODEBOOK_L2: Quantiser(1, partial(_quantise_by_codebook, norm_of=l2_norm), *_OF_CODEBOOK),
    CODEBOOK_LINF: Quantiser(1, partial(_quantise_by_codebook, norm_of=linf_norm), *_OF_CODEBOOK),
    CODEBOOK_MINMAX: Quantiser(2, _quantise_between, _dequantise_between, _ends),
    **{codec: _of_format(form, _quantise_block, E8M0_SCALES) for codec, form in FORMATS.items()},
    NVFP4: _of_format(FORMATS[E2M1], _quantise_in_units, E4M3_SCALES, partial(_unit, form=FORMATS[E2M1])),
}


# --- shared -------------------------------------------------------------------------------------------------


def _round(t: Floats, u: Floats | None, limit: np.float32) -> Bytes:
    """Returns codes of the non-negative t, rounded to nearest even or to floor(t + u)."""
    rounded = np.rint(t) if u is None else np.floor(t + u)
    return np.clip(rounded, 0, limit).astype(np.uint8)


def _with_sign(magnitude: Bytes, c: Floats, level: Level) -> Bytes:
    """Returns the magnitude with the sign of c in the top bit; zero has no sign."""
    negative = (c < 0) & (magnitude != 0)
    code: Bytes = magnitude | (negative.astype(np.uint8) << np.uint8(level.bits - 1))
    return code


def _divisible(norm: Floats, steps: np.float32) -> tuple[Floats, Floats]:
    """Returns the norm and steps / norm; both are 0 where the norm is too small to be divided by."""
    inverse = steps / norm
    vanishing = ~np.isfinite(inverse) & ~np.isnan(norm)
    norm = norm.copy()
    norm[vanishing], inverse[vanishing] = 0, 0
    return norm, inverse
