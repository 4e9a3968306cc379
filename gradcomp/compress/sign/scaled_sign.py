"""ScaledSign sends the sign of every value, and one magnitude for all of them (Vogels et al. 2019, Table 4)."""

from __future__ import annotations

from dataclasses import dataclass

from gradcomp.compress.registry import register
from gradcomp.compress.sign.means import SignAndMeans
from gradcomp.kernels.segments import SIGN


@register("scaled_sign")
@dataclass(frozen=True)
class ScaledSign(SignAndMeans):
    """Send the sign of every value, and the mean magnitude of each quantisation bucket.

    C(v) = sign(v) ||v||_1 / n for the n values v of a bucket; sign(0) is positive. C is biased, so residuals are kept
    by default. The mean over ranks is coded in the same way before it is sent back, with a server-side error.

    ``bucket_size``: values that share a magnitude; None: the whole layer, as in the paper; one rank then adds up the
    whole layer. ``feedback``: keep residuals.
    Wire, per direction: 1 bit per value and 4 bytes per bucket, 1.0625 bits per value at 512; two rounds under
    scatter-reduce-allgather.
    State: a residual per layer and the chunk owner's server-side error, float32.
    Errors: ConfigError for a bucket size below 1 and a feedback that is neither true nor false.
    Source: Vogels et al. 2019, Table 4 (Sign+Norm), after Karimireddy et al. 2019. Differs: the default is a bucket of
    512 values instead of a layer; the paper gathers all ranks' signs and averages them, without coding the mean again.
    """

    kind = SIGN
