"""OneBit sends the sign of every value, and the mean of either sign (Seide et al. 2014)."""

from __future__ import annotations

from dataclasses import dataclass

from gradcomp.compress.registry import register
from gradcomp.compress.sign.means import SignAndMeans
from gradcomp.kernels.segments import ONEBIT


@register("one_bit")
@dataclass(frozen=True)
class OneBit(SignAndMeans):
    """Send one bit per value, and per quantisation bucket the two numbers that the bits stand for.

    bit = v < tau with tau = 0; a set bit decodes to the mean of the bucket's values below tau, a clear one to the mean
    of the rest. For these bits the two means give the smallest squared error. The mean of no values is 0. The code is
    biased, so residuals are kept by default. The mean over ranks is coded in the same way before it is sent back.

    ``bucket_size``: values that share the two means; None: the whole layer. ``feedback``: keep residuals.
    Wire, per direction: 1 bit per value and 8 bytes per bucket, 1.125 bits per value at 512; two rounds under
    scatter-reduce-allgather.
    State: a residual per layer and the chunk owner's server-side error, float32.
    Errors: ConfigError for a bucket size below 1 and a feedback that is neither true nor false.
    Source: Markov 2024, section 2.2.3; Seide et al. 2014, as cited there. Differs: quantisation buckets are consecutive
    values, where the original uses the columns of a weight matrix.
    """

    kind = ONEBIT
