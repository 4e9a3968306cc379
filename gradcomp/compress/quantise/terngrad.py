"""TernGrad sends minus, zero or plus the largest magnitude, at random (Wen et al. 2017)."""

from __future__ import annotations

from dataclasses import dataclass

from gradcomp.compress.bounds import Distortion, of_magnitudes
from gradcomp.compress.quantise.bucketed import WHOLE_LAYER, Bucketed, check_bucket_size
from gradcomp.compress.registry import register
from gradcomp.core.layers import LayerSpec
from gradcomp.kernels.codec import Codec, Table
from gradcomp.kernels.segments import LINF


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
