"""Narrow floating formats and the formats of numbers in scale records, in NumPy. Part of `reference`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from gradcomp.kernels.segments import E2M1, E4M3, E5M2

Floats: TypeAlias = npt.NDArray[np.float32]
Codes: TypeAlias = npt.NDArray[np.uint8]


class Format(NamedTuple):
    """A format: mantissa bits, exponents of the smallest and largest normal number, and the largest number's code."""

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
    """Returns codes of the least E4M3 numbers not below x, from 1, the least code with an inverse, to the largest."""
    form = FORMATS[E4M3]
    fewer = 23 - form.mantissa
    cut = (x.view(np.uint32) + np.uint32((1 << fewer) - 1)) >> np.uint32(fewer)
    normal = cut.astype(np.int32) - ((126 + form.least) << form.mantissa)
    border = np.float32(2.0**form.least)
    subnormal = np.ceil(np.fmin(x, border) * np.float32(2.0 ** (form.mantissa - form.least))).astype(np.int32)
    code = np.where(x < border, subnormal, normal)
    return np.clip(code, 1, form.largest_code).astype(np.int32)


# --- scale records ---


class ScaleFormat(NamedTuple):
    """The format of a number in a scale record."""

    nbytes: int
    pack: Callable[[Floats], Codes]
    unpack: Callable[[Codes], Floats]


def _pack_powers(scales: Floats) -> Codes:
    """Encodes normal powers of two in E8M0."""
    return (np.frexp(scales)[1] + 126).astype(np.uint8)


def _unpack_powers(source: Codes) -> Floats:
    """Decodes E8M0, in which 255 is NaN."""
    scales: Floats = np.ldexp(np.float32(1), np.minimum(source, 254).astype(np.int32) - 127)
    scales[source == 255] = np.nan
    return scales


def _pack_e4m3(scales: Floats) -> Codes:
    """Encodes numbers that E4M3 represents exactly."""
    return rounded_up(scales).astype(np.uint8)


def _unpack_e4m3(source: Codes) -> Floats:
    """Decodes non-negative E4M3; every code above the largest number's, one with a sign included, is NaN."""
    form = FORMATS[E4M3]
    scales = form.magnitude(np.minimum(source, form.largest_code))
    scales[source > form.largest_code] = np.nan
    return scales


FLOAT32_SCALES = ScaleFormat(4, lambda scales: scales.view(np.uint8), lambda source: source.view("<f4"))
E8M0_SCALES = ScaleFormat(1, _pack_powers, _unpack_powers)
E4M3_SCALES = ScaleFormat(1, _pack_e4m3, _unpack_e4m3)
