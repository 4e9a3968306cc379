"""Whether an optimizer has stepped on the parameters of a model, for those whom no optimizer tells."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook


class StepWatch:
    """Hears of the steps of all optimizers, and remembers whether one of them has some of the parameters.

    ``goes_on`` is called if the first one that steps had stepped before this object was made, or was loaded.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter], goes_on: Callable[[], None]) -> None:
        self._parameters = {id(parameter) for parameter in parameters}
        self._goes_on = goes_on
        self._ours: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._stepped = False
        me = weakref.ref(self)  # the hooks must not keep the model's state alive

        def before_step(optimizer: torch.optim.Optimizer, _: Any, __: Any) -> None:
            watch = me()
            if watch is not None:
                watch._before_step(optimizer)

        def after_step(optimizer: torch.optim.Optimizer, _: Any, __: Any) -> None:
            watch = me()
            if watch is not None and optimizer in watch._ours:
                watch._stepped = True

        for handle in (
            register_optimizer_step_pre_hook(before_step),
            register_optimizer_step_post_hook(after_step),
        ):
            weakref.finalize(self, handle.remove)

    def _before_step(self, optimizer: torch.optim.Optimizer) -> None:
        if optimizer in self._ours:
            return
        groups = optimizer.param_groups
        if any(id(parameter) in self._parameters for group in groups for parameter in group["params"]):
            if not self._ours and _has_stepped(optimizer):
                self._goes_on()
            self._ours.add(optimizer)

    def stepped(self) -> bool | None:
        """Whether one has stepped since the last call; None if parameters change without optimizers, or did so far."""
        stepped, self._stepped = self._stepped, False
        return stepped if self._ours else None


def _has_stepped(optimizer: torch.optim.Optimizer) -> bool:
    """By what it keeps: where that counts steps (some optimizers make it when they are made) by their number."""
    for state in optimizer.state.values():
        if isinstance(state, dict):
            steps = state.get("step")
            if any(kept is not None for kept in state.values()) if steps is None else float(steps) > 0:
                return True
    return False
