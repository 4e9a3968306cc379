"""The optimizer of PowerSGD's paper (Vogels et al. 2019), for reproducing its tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gradcomp.core.errors import ConfigError


class PostMomentumSGD(torch.optim.Optimizer):
    """SGD with momentum applied after decompression, as in Algorithm 2 of Vogels et al. 2019, lines 11 to 13.

        D' = the mean that the exchange left in ``.grad`` (+ ``weight_decay`` x)
        m <- momentum m + D'
        x <- x - lr (D' + m)

    This is neither heavy ball (x - lr m) nor PyTorch's Nesterov form (x - lr (D' + momentum m)): after a
    constant gradient the step is (2 - momentum) / (1 - momentum) lr D'. Wrap it in ``DistributedOptimizer``
    as any other optimizer.

    ``lr``, ``momentum`` and ``weight_decay`` are floats. Raises ConfigError for negative ones and a momentum
    of 1 or more. State: m per parameter. Source: Vogels et al. 2019, Algorithm 2; differs in weight decay,
    which the algorithm does not have and which is the usual one here.
    """

    def __init__(self, params: Any, lr: float, momentum: float = 0.9, weight_decay: float = 0.0) -> None:
        if not lr >= 0 or not 0 <= momentum < 1 or not weight_decay >= 0:
            raise ConfigError(
                f"impossible lr {lr}, momentum {momentum} or weight_decay {weight_decay}: lr and weight_decay must not "
                "be negative, and momentum must be at least 0 and below 1"
            )
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step on the gradients as they are in ``.grad``."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                update = parameter.grad
                if group["weight_decay"]:
                    update = update.add(parameter, alpha=group["weight_decay"])
                state = self.state[parameter]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(parameter)
                state["momentum_buffer"].mul_(group["momentum"]).add_(update)
                parameter.sub_(update + state["momentum_buffer"], alpha=group["lr"])
        return loss
