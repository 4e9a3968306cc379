"""Quantize is uniform quantisation by bucket: CGX's default (Markov 2024), QSGD, and random shifts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from gradcomp.compress import bounds
from gradcomp.compress.base import Coded, Traits
from gradcomp.compress.bounds import ANY_LAYER, Distortion
from gradcomp.compress.checks import check_flag, check_number, check_whole, check_word
from gradcomp.compress.registry import register
from gradcomp.core.errors import ConfigError
from gradcomp.core.layers import LayerSpec
from gradcomp.core.plan import MOST_BLOCKS, Level
from gradcomp.kernels import segments
from gradcomp.kernels.codec import Codec, Table

_ALLOCATIONS = {"bucket": segments.MINMAX_LEAST_BYTES, "bytes": segments.MINMAX_LEAST_ERROR}
_KINDS = {"minmax": segments.MINMAX, "l2": segments.L2, "linf": segments.LINF}
_ROUNDINGS = ("stochastic", "nearest", "shift")


@register("quantize")
@dataclass(frozen=True)
class Quantize(Coded):
    """Quantise buckets of ``bucket_size`` consecutive values of a layer to ``bits`` bits each.

    ``scaling="minmax"`` (default)
        lo, hi = min, max of the bucket; unit = (hi - lo) / (2^b - 1); code = round((v - lo) / unit);
        value = lo + code unit. 8 bytes of scale per bucket.
    ``scaling="l2"`` or ``"linf"`` (QSGD)
        norm = ||v||; s = 2^(b-1) - 1 magnitudes and a sign bit; code = round(s |v| / norm); value = sign norm code / s.
        With one bit, a code is only the sign. 4 bytes of scale per bucket.
    ``bits=(3, 4, 4, 2)``
        2 to 256 bit widths, one for each block of rows. Block i of n holds the rows R i // n to R (i + 1) // n of R;
        the rows of a vector are its elements. A block begins with the quantisation bucket in which its first row
        begins, so all values of a bucket have the same bit width.
    ``rounding="stochastic"`` (default)
        rounds to the upper level with probability (v - lower) / (upper - lower). This is unbiased, so no residual is
        needed, neither for the gradient nor for the mean, which the chunk owner quantises again.
    ``rounding="nearest"``
        is biased, with a smaller error; ``feedback`` is then on by default. With one bit, a code is the sign, and
        decodes to plus or minus the mean magnitude of the bucket; with ``minmax`` it decodes to the mean of the
        bucket's negative values or to the mean of its other values.
    ``rounding="shift"`` (Markov 2024, definition 1)
        takes one draw u in (-1/2, 1/2) per layer and step; code = round((v - lo) / unit - u);
        value = lo + (code + u) unit. The scale record holds lo + u unit. This is unbiased, and the variance is
        unit^2 / 12 for every v. Decoded values may lie up to half a unit outside of [lo, hi]. All codes have b bits. It
        needs ``minmax``. Each rank draws a u for its gradient. A mean has one u, and all shards of an all-gather have
        the same u.
    ``allocate="bucket"``
        assigns 0 to 8 bits to each quantisation bucket, the fewest at which the expected squared error of a layer is no
        larger than with ``bits`` bits for all: minimise sum n_k b_k subject to
        sum n_k R_k^2 e(b_k) <= sum n_k R_k^2 e(b), R = hi - lo, e(b) = (1/6) / (2^b - 1)^2, and 1/4 for one bit. A
        constant bucket takes 0 bits. Bits are chosen for each layer's part within a chunk, by each rank for its
        payload and by the chunk's owner for the mean. The code is unbiased and needs no residual. It needs ``minmax``
        and stochastic rounding.
    ``allocate="bytes"``
        minimises the error at the payload size of ``bits`` bits for all buckets, so the size is fixed. Under a
        reduction that needs fixed sizes, ``"bucket"`` does the same as ``"bytes"``.

    Wire, per direction: ceil(n b / 8) bytes of codes and the scales; two rounds under scatter-reduce-allgather.
    With ``allocate`` the scale and the bit width take 9 bytes per bucket, and codes are packed in groups of eight.
    ``"bucket"`` sends sizes before payloads, and takes one more round when a size grows.
    State: with feedback, a residual per layer and the chunk owner's server-side error.
    Errors: ConfigError for bits outside 1..8, one block or more than 256, a bucket size below 1, unknown words; for
    feedback that would diverge, or never send anything (few bits of an l2 norm, to nearest); for ``shift`` with another
    scaling or with ``allocate``.
    Source: Markov 2024, sections 2.2.3, 3.5.1, 3.5.3 and 5.5.1; QSGD as cited there. Differs: the default bucket size
    is 512 (Markov uses 128 or 1024, by model family); the probability is that of section 2.2.3 (section 5.4.2 inverts
    it). ``allocate`` is gradcomp's own, see ``docs/decisions/0032``.
    """

    level_field: ClassVar[str | None] = "bits"
    levels_by_block: ClassVar[bool] = True

    bits: int | tuple[int, ...] = 4
    bucket_size: int = 512
    scaling: str = "minmax"
    rounding: str = "stochastic"
    feedback: bool | None = None
    decay: float = 1.0
    allocate: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.bits, tuple) and not 2 <= len(self.bits) <= MOST_BLOCKS:
            raise ConfigError(f"bits by block must be 2 to {MOST_BLOCKS} numbers, got {len(self.bits)}")
        for bits in self.bits if isinstance(self.bits, tuple) else (self.bits,):
            check_whole("bits", bits, 1, 8)
        check_whole("bucket_size", self.bucket_size, 1, 2**31 - 1)
        check_word("scaling", self.scaling, _KINDS)
        check_word("rounding", self.rounding, _ROUNDINGS)
        check_flag("feedback", self.feedback, or_none=True)
        if self.rounding == "shift" and self.scaling != "minmax":
            raise ConfigError(f"rounding=shift needs scaling=minmax, got {self.scaling!r}")
        check_number("decay", self.decay, "[0, 1]")
        if self.allocate is not None:
            if self.allocate not in _ALLOCATIONS:
                raise ConfigError(f"allocate must be bucket, bytes or none, got {self.allocate!r}")
            if self.scaling != "minmax" or self.rounding != "stochastic":
                raise ConfigError(f"allocate={self.allocate} needs scaling=minmax and rounding=stochastic")
        if self.traits.keeps_residual:
            bounds.check_feedback_around(self.to_string(), self.distortion(ANY_LAYER))

    def distortion(self, layer: LayerSpec) -> Distortion:
        """Bound the error by the number of levels and the bucket size; of several bit widths take the worst."""
        numbers = set(self.bits) if isinstance(self.bits, tuple) else {self.bits}
        return bounds.worst_of([self._distortion(bits, layer) for bits in sorted(numbers)])

    def _distortion(self, bits: int, layer: LayerSpec) -> Distortion:
        elements, nearest = min(self.bucket_size, layer.size), self.rounding == "nearest"
        if bits == 1 and nearest:
            return bounds.of_mean_sign(elements)
        if self.rounding == "shift":
            return bounds.of_moved_extremes((1 << bits) - 1, elements)
        if self.scaling == "minmax":
            uniform = bounds.of_extremes((1 << bits) - 1, elements, nearest=nearest)
            # A bucket may have one bit; a layer's error is at most 1.5 times (1/4 over 1/6) that of uniform bits.
            return uniform if self.allocate is None else Distortion(1.5 * uniform.bound, True, 2.0)
        if bits == 1:
            return bounds.of_drawn_sign(elements, l2=self.scaling == "l2")
        s = (1 << (bits - 1)) - 1
        levels = [i / s for i in range(1, s + 1)]
        return bounds.of_magnitudes(levels, elements, l2=self.scaling == "l2", nearest=nearest)

    @cached_property
    def traits(self) -> Traits:
        return Traits.of_rounding(self.rounding, self.feedback, self.decay)

    def codec_for(self, table: Table) -> Codec:
        """Return the codec; the number of bits is in the segment table."""
        if self.allocate is not None:
            return Codec(_ALLOCATIONS[self.allocate], stochastic=True)
        if self.rounding == "shift":
            return Codec(segments.MINMAX_SHIFT, stochastic=True)
        return Codec(_KINDS[self.scaling], self.rounding == "stochastic")

    def fill(self, table: Table, level: Level) -> None:
        check_whole("bits", level, 1, 8)
        table["level"] = level
        table["bucket_size"] = self.bucket_size

    def cut_elements(self, layer: LayerSpec) -> int:
        """Return the bucket size, so that no cut changes a scale."""
        return self.bucket_size
