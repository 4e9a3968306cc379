"""SignAndMeans sends the sign of every value, and mean magnitudes of each quantisation bucket."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from gradcomp.compress.base import Traits
from gradcomp.compress.bounds import Distortion, of_mean_sign
from gradcomp.compress.quantise.bucketed import WHOLE_LAYER, Bucketed, check_bucket_size, check_feedback
from gradcomp.core.layers import LayerSpec
from gradcomp.kernels.codec import Codec, Table


@dataclass(frozen=True)
class SignAndMeans(Bucketed):
    """Base of the compressors that send signs and means.

    ``kind``: the number of the codec. ``bucket_size``: the values that share means; None: the whole layer.
    """

    kind: ClassVar[int]

    bucket_size: int | None = 512
    feedback: bool = True

    def __post_init__(self) -> None:
        check_bucket_size(self.bucket_size)
        check_feedback(self.feedback)

    def distortion(self, layer: LayerSpec) -> Distortion:
        return of_mean_sign(min(self.bucket_size or WHOLE_LAYER, layer.size))

    @cached_property
    def traits(self) -> Traits:
        return Traits(keeps_residual=self.feedback, reduces=True)

    def codec_for(self, table: Table) -> Codec:
        return Codec(self.kind)
