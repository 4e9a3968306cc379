"""1-bit SGD: the sign of every value, and the mean of either sign (Seide et al. 2014)."""

from __future__ import annotations

from dataclasses import dataclass

from gradcomp.compress.registry import register
from gradcomp.compress.sign.means import SignAndMeans
from gradcomp.kernels.segments import ONEBIT


@register("one_bit")
@dataclass(frozen=True)
class OneBit(SignAndMeans):
    """Send one bit per value, and per bucket the two numbers that it stands for.

    bit = v < tau with tau = 0; a set bit decodes to the mean of the bucket's values below tau, the other to the mean
    of the rest, which makes the error of the bucket smallest for these bits. The mean of no values is 0. Biased, so
    residuals are kept by default. The mean over ranks is coded in the same way for the way back.

    ``bucket_size``: values that share the two means; None: the whole layer. ``feedback``: keep residuals.
    Wire, per direction: 1 bit a value and 8 bytes a bucket, 1.125 bits a value at 512; two rounds under
    scatter-reduce-allgather. State: a residual per layer and the chunk owner's second residual, float32.
    Errors: ConfigError for a bucket size below 1 and a feedback that is neither true nor false.
    Source: Markov 2024 (CGX), section 2.2.3; Seide et al. 2014, as cited there. Differs: buckets of consecutive
    values where the original takes the columns of a weight matrix.
    """

    kind = ONEBIT
