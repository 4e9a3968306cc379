"""Whether an optimizer has stepped on the parameters of a model, for those whom no optimizer tells."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook


class StepWatch:
    """Hears of the steps of all optimizers, and remembers whether one of them has some of the parameters."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._parameters = {id(parameter) for parameter in parameters}
        self._ours: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        #: How often one of them has stepped.
        self.steps = 0
        self._told = 0
        me = weakref.ref(self)  # the hook must not keep the model's state alive

        def after_step(optimizer: torch.optim.Optimizer, _: Any, __: Any) -> None:
            watch = me()
            if watch is not None:
                watch._after_step(optimizer)

        handle = register_optimizer_step_post_hook(after_step)
        weakref.finalize(self, handle.remove)

    def _after_step(self, optimizer: torch.optim.Optimizer) -> None:
        if optimizer not in self._ours:
            groups = optimizer.param_groups
            if not any(
                id(parameter) in self._parameters for group in groups for parameter in group["params"]
            ):
                return
            self._ours.add(optimizer)
        self.steps += 1

    def stepped(self) -> bool | None:
        """Whether one has stepped since the last call; None if parameters change without optimizers, or did so far."""
        stepped, self._told = self.steps > self._told, self.steps
        return stepped if self._ours else None
