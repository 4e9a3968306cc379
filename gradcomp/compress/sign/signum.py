"""Signum sends signs of a momentum and takes a majority vote (Bernstein et al. 2019)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from gradcomp.compress.base import Traits
from gradcomp.compress.quantise.bucketed import Bucketed, check_bucket_size
from gradcomp.compress.registry import register
from gradcomp.core.errors import ConfigError
from gradcomp.kernels.codec import Codec, Table
from gradcomp.kernels.segments import VOTE


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
        check_bucket_size(self.bucket_size)
        number = isinstance(self.momentum, int | float) and not isinstance(self.momentum, bool)
        if not number or not 0.0 <= self.momentum < 1.0:
            raise ConfigError(f"momentum must be in [0, 1), got {self.momentum!r}")

    @cached_property
    def traits(self) -> Traits:
        """Return momentum and no residual, because none can hold what a vote leaves out."""
        return Traits(momentum=self.momentum, reduces=True, accounts=False)

    def codec_for(self, table: Table) -> Codec:
        """Return a codec of signs without magnitude: to encode their mean is to vote. Draws decide ties."""
        return Codec(VOTE, stochastic=True)
