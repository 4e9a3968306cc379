"""The arguments of :func:`gradcomp.torch.DistributedOptimizer`."""

from __future__ import annotations

from dataclasses import InitVar, dataclass

from gradcomp.compress import Compressor, Policy, as_policy
from gradcomp.control import Controller
from gradcomp.job.reduce_op import ReduceOp
from gradcomp.job.start import check_arguments
from gradcomp.torch.loss_scale import LossScale, Scaler
from gradcomp.torch.timing import Finish, OnSkip, Timing


@dataclass(eq=False)
class Arguments:
    """The arguments of :func:`DistributedOptimizer`, validated by :meth:`check`."""

    compression: Policy | Compressor | str
    passes: int
    op: ReduceOp
    predivide: float
    sparse_as_dense: bool
    finish: Finish
    grad_scaler: InitVar[Scaler]
    reduction: str | None
    controller: Controller | str | None
    on_skip: OnSkip
    residuals: str | None

    def __post_init__(self, grad_scaler: Scaler) -> None:
        self.loss_scale = LossScale(grad_scaler)

    def take(self, policy: Policy) -> None:
        """From now on the compression is this one, and no controller changes it."""
        self.compression, self.controller = policy, None

    def check(self) -> tuple[Policy, Timing]:
        """Raise ConfigError for what cannot work."""
        check_arguments(self.op, self.predivide, self.reduction, self.residuals)
        self.loss_scale.check()
        return as_policy(self.compression), Timing(self.passes, self.finish, self.on_skip)
