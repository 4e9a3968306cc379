"""The arguments of :func:`gradcomp.torch.DistributedOptimizer`."""

from __future__ import annotations

from dataclasses import InitVar, dataclass, fields
from typing import Any

from gradcomp.compress import Compression, Compressor, Policy, as_policy
from gradcomp.control import Controller
from gradcomp.core.errors import ConfigError
from gradcomp.job.reduce_op import Adasum, Average, ReduceOp
from gradcomp.job.start import check_arguments
from gradcomp.torch.grouping import check_groups
from gradcomp.torch.loss_scale import LossScale, Scaler
from gradcomp.torch.timing import Finish, OnSkip, Timing

_NOT_FOR_ADASUM = ("finish", "reduction", "controller", "on_skip")


@dataclass(eq=False)
class Arguments:
    """The arguments of :func:`DistributedOptimizer`, validated by :meth:`check`."""

    compression: Policy | Compressor | str = Compression.none
    passes: int = 1
    op: ReduceOp = Average
    predivide: float = 1.0
    groups: Any = None
    sparse_as_dense: bool = False
    finish: Finish = "backward"
    grad_scaler: InitVar[Scaler] = None
    reduction: str | None = None
    controller: Controller | str | None = None
    on_skip: OnSkip = "raise"

    def __post_init__(self, grad_scaler: Scaler) -> None:
        self.loss_scale = LossScale(grad_scaler)

    def take(self, policy: Policy) -> None:
        """Use this compression from now on, without a controller."""
        self.compression, self.controller = policy, None

    def check(self) -> tuple[Policy, Timing]:
        """Return the policy and the timing; raise ConfigError for arguments that cannot work."""
        # check() sees Adasum in a world of one only, where the Adasum of the step is the step itself.
        op = Average if self.op is Adasum else self.op
        check_arguments(op, self.predivide, self.reduction)
        check_groups(self.groups)
        self.loss_scale.check()
        return as_policy(self.compression), Timing(self.passes, self.finish, self.on_skip)

    def check_adasum(self) -> None:
        """Raise ConfigError for arguments that cannot work, or have no meaning, with ``op=Adasum``."""
        check_groups(self.groups)
        Timing(self.passes)
        if self.predivide != 1.0:
            raise ConfigError("gradient_predivide_factor needs op=Average")
        for field in fields(self):
            if field.name in _NOT_FOR_ADASUM and getattr(self, field.name) != field.default:
                raise ConfigError(
                    f"{field.name}= has no meaning with op=Adasum: ranks exchange steps, not gradients"
                )
