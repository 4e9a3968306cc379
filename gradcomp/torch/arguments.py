"""The arguments of :func:`gradcomp.torch.DistributedOptimizer`."""

from __future__ import annotations

from gradcomp.compress import Compressor, Policy, as_policy
from gradcomp.control import Controller
from gradcomp.job.reduce_op import ReduceOp
from gradcomp.job.start import check_arguments
from gradcomp.torch.loss_scale import LossScale, Scaler
from gradcomp.torch.timing import Finish, OnSkip, Timing


class Arguments:
    """The arguments of :func:`DistributedOptimizer`, validated."""

    def __init__(
        self,
        compression: Policy | Compressor | str,
        passes: int,
        op: ReduceOp,
        predivide: float,
        sparse_as_dense: bool,
        finish: Finish,
        grad_scaler: Scaler,
        reduction: str | None,
        controller: Controller | str | None,
        on_skip: OnSkip,
    ) -> None:
        self._on_skip = on_skip
        self._compression = compression
        self._passes = passes
        self._finish = finish
        self.op = op
        self.predivide = predivide
        self.sparse_as_dense = sparse_as_dense
        self.loss_scale = LossScale(grad_scaler)
        self.reduction = reduction
        self.controller = controller

    def take(self, policy: Policy) -> None:
        """From now on the compression is this one, and no controller changes it."""
        self._compression, self.controller = policy, None

    def check(self) -> tuple[Policy, Timing]:
        """Raise ConfigError for what cannot work."""
        check_arguments(self.op, self.predivide, self.reduction)
        self.loss_scale.check()
        return as_policy(self._compression), Timing(self._passes, self._finish, self._on_skip)
