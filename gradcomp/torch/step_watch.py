"""Whether an optimizer has stepped on the parameters of a model, for those whom no optimizer tells."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from gradcomp.torch.fingerprint import scalars_of


class Listener(Protocol):
    """Who hears of the steps of optimizers that hold the parameters."""

    def appears(self, optimizer: torch.optim.Optimizer, *, had_stepped: bool) -> None:
        """One is seen for the first time. ``had_stepped``: before this object was made, or it was loaded."""
        ...

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """It is about to step; what is raised is raised in its ``step()``."""
        ...

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """It has stepped."""
        ...


class StepWatch:
    """Hears of the steps of all optimizers, and counts those of optimizers that have some of the parameters."""

    def __init__(self, parameters: Iterable[torch.Tensor], listener: Listener | None = None) -> None:
        self._parameters = {id(parameter) for parameter in parameters}
        self._listener = listener
        self._ours: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        #: How often one of them has stepped.
        self.steps = 0
        self._told = 0
        me = weakref.ref(self)  # the hooks must not keep the model's state alive

        def before_step(optimizer: torch.optim.Optimizer, _: Any, __: Any) -> None:
            watch = me()
            if watch is not None and watch.holds(optimizer) and watch._listener is not None:
                watch._listener.before_step(optimizer)

        def after_step(optimizer: torch.optim.Optimizer, _: Any, __: Any) -> None:
            watch = me()
            if watch is not None and optimizer in watch._ours:
                watch.steps += 1
                if watch._listener is not None:
                    watch._listener.after_step(optimizer)

        for handle in (
            register_optimizer_step_pre_hook(before_step),
            register_optimizer_step_post_hook(after_step),
        ):
            weakref.finalize(self, handle.remove)

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Those that have been seen."""
        return list(self._ours)

    def holds(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether it has some of the parameters; the first time that it does, the listener hears of it."""
        if optimizer in self._ours:
            return True
        groups = optimizer.param_groups
        if not any(id(parameter) in self._parameters for group in groups for parameter in group["params"]):
            return False
        self._ours.add(optimizer)
        if self._listener is not None:
            self._listener.appears(optimizer, had_stepped=_has_stepped(optimizer))
        return True

    def scalars(self) -> str:
        """The settings of those that have been seen, as text; they have no order of their own."""
        return f"[{', '.join(sorted(scalars_of([optimizer])[1:-1] for optimizer in self._ours))}]"

    def stepped(self) -> bool | None:
        """Whether one has stepped since the last call; None if parameters change without optimizers, or did so far."""
        stepped, self._told = self.steps > self._told, self.steps
        return stepped if self._ours else None


def _has_stepped(optimizer: torch.optim.Optimizer) -> bool:
    """By what it keeps: where that counts steps (some optimizers make it when they are made) by their number."""
    for state in optimizer.state.values():
        if isinstance(state, dict):
            steps = state.get("step")
            if any(kept is not None for kept in state.values()) if steps is None else float(steps) > 0:
                return True
    return False
