"""Compressors that send the sign of every value: OneBit and ScaledSign with mean magnitudes, Signum with a vote."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from gradcomp.compress.base import Traits
from gradcomp.compress.bounds import Distortion, of_mean_sign
from gradcomp.compress.checks import check_flag, check_number, check_whole
from gradcomp.compress.quantise.bucketed import WHOLE_LAYER, Bucketed
from gradcomp.compress.registry import register
from gradcomp.core.layers import LayerSpec
from gradcomp.kernels.codec import Codec, Table
from gradcomp.kernels.segments import ONEBIT, SIGN, VOTE


@dataclass(frozen=True)
class SignAndMeans(Bucketed):
    """Base of the compressors that send signs and means.

    ``kind``: the number of the codec. ``bucket_size``: the values that share means; None: the whole layer.
    """

    kind: ClassVar[int]

    bucket_size: int | None = 512
    feedback: bool = True

    def __post_init__(self) -> None:
        check_whole("bucket_size", self.bucket_size, 1, WHOLE_LAYER, or_none=True)
        check_flag("feedback", self.feedback)

    def distortion(self, layer: LayerSpec) -> Distortion:
        return of_mean_sign(min(self.bucket_size or WHOLE_LAYER, layer.size))

    @cached_property
    def traits(self) -> Traits:
        return Traits(keeps_residual=self.feedback, reduces=True)

    def codec_for(self, table: Table) -> Codec:
        return Codec(self.kind)


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


@register("signum")
@dataclass(frozen=True)
class Signum(Bucketed):
    """Vote with the sign of every rank's momentum; the result is +1 or -1, the majority's sign.

    m <- beta m + (1 - beta) g on every rank; result = sign(sum over ranks of sign(m)). A rank whose value is zero votes
    +1 or -1 at random, by its own draw, and a draw that all ranks share decides a tie: one bit cannot represent zero,
    but its mean is zero. The result has no magnitude: the learning rate is the step of every parameter, and must be
    smaller than for SGD. The state is u <- beta u + g, which is m / (1 - beta) and has the same sign. The optimizer
    must not have a momentum of its own.

    ``bucket_size``: values that share a record, which is 0 where all of them are 0 and else 1, so that a layer without
    gradients does not move (a rank with a record of 0 does not vote); None: the whole layer.
    ``momentum``: beta, from 0 up to but not including 1; 0 votes with the gradient itself (signSGD).
    Wire, per direction: 1 bit per value and 4 bytes per bucket, 1.008 bits per value at 4,096; two rounds under
    scatter-reduce-allgather.
    State: u per layer and rank, float32, with ``momentum``. There is never a residual: the result is no mean of what
    the ranks sent, so no residual could hold the rest (a declared exception to the contract of compressors).
    Errors: ConfigError for a bucket size below 1 and a momentum outside [0, 1).
    Source: Bernstein et al. 2019, as used in Vogels et al. 2019, Tables 6 and 7. Differs: the chunk's owner counts the
    votes, instead of every rank after a gather; in a bucket in which every vote is a tie the result is 0.
    """

    bucket_size: int | None = 4096
    momentum: float = 0.9

    def __post_init__(self) -> None:
        check_whole("bucket_size", self.bucket_size, 1, WHOLE_LAYER, or_none=True)
        check_number("momentum", self.momentum, "[0, 1)")

    @cached_property
    def traits(self) -> Traits:
        """Return momentum and no residual, because none can hold what a vote leaves out."""
        return Traits(momentum=self.momentum, reduces=True, accounts=False)

    def codec_for(self, table: Table) -> Codec:
        """Return a codec of signs without magnitude: to encode their mean is to vote. Draws decide ties."""
        return Codec(VOTE, stochastic=True)
