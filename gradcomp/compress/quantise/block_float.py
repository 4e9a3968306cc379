"""BlockFloat sends narrow floating formats whose values share a scale, such as OCP Microscaling and NVFP4."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from gradcomp.compress.base import Traits
from gradcomp.compress.bounds import ANY_LAYER, Distortion, check_feedback_around
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
from gradcomp.kernels.quantisers import FORMATS
from gradcomp.kernels.segments import E2M1, E4M3, E5M2, LEVELS, NVFP4

_FORMATS = {"fp8_e4m3": E4M3, "fp8_e5m2": E5M2, "fp4_e2m1": E2M1}
_CODECS = {("e8m0", name): codec for name, codec in _FORMATS.items()} | {("e4m3", "fp4_e2m1"): NVFP4}
ROUNDINGS = ("stochastic", "nearest")
SCALES = ("e8m0", "e4m3")


@register("block_float")
@dataclass(frozen=True)
class BlockFloat(Bucketed):
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
        check_bucket_size(self.block, "block")
        check_word("rounding", self.rounding, ROUNDINGS)
        check_feedback(self.feedback, or_none=True)
        check_word("scale", self.scale, SCALES)
        if (self.scale, self.format) not in _CODECS:
            raise ConfigError(f"scale=e4m3 needs format=fp4_e2m1, got {self.format}")
        if self.traits.keeps_residual:
            check_feedback_around(self.to_string(), self.distortion(ANY_LAYER))

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
            of_unit = 2.0**-9 * smallest / float(FORMATS[E4M3].largest)
            below = (elements * smallest**2 + layer.size * of_unit**2) / 2
        bound = 4.0 ** -(form.mantissa + 1) + below
        step = max(2.0**-form.mantissa, 2 * smallest)
        nearest = self.rounding == "nearest"
        return Distortion(bound, not nearest, step / 2 if nearest else step)

    @cached_property
    def traits(self) -> Traits:
        return Traits.of_rounding(self.rounding, self.feedback)

    @property
    def code_bits(self) -> int:
        return LEVELS[_FORMATS[self.format]].start

    def codec_for(self, table: Table) -> Codec:
        return Codec(_CODECS[self.scale, self.format], self.rounding == "stochastic")
