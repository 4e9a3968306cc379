"""The steps of optimizers on parameters whose gradients are exchanged, for those whom no optimizer tells."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from gradcomp.core.errors import StateError
from gradcomp.job import runtime
from gradcomp.job.step_driver import StepDriver
from gradcomp.torch.fingerprint import scalars_of
from gradcomp.torch.modules import opaque

_INSIDE = (
    "an optimizer steps inside backward(), as from a hook by register_post_accumulate_grad_hook(): there, gradients "
    "are this rank's alone, and their means are exchanged until backward() returns. Take the hook away, and call "
    "step() behind backward()"
)


def refuse_inside_backward() -> None:
    """StateError where autograd runs a backward pass on this thread."""
    if torch._C._current_graph_task_id() != -1:
        raise StateError(_INSIDE)


class Listener(Protocol):
    """Who hears of the steps of optimizers that hold some of the parameters."""

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
    """Hears of the steps of all optimizers, and counts those of optimizers that hold some of the parameters."""

    def __init__(self, parameters: Iterable[torch.Tensor], listener: Listener | None = None) -> None:
        #: How often one of them has stepped.
        self.steps = 0
        self._told = 0
        self._parameters = {id(parameter) for parameter in parameters}
        self._listener = listener
        #: How many groups of parameters an optimizer had when it was looked at: further ones may have ours.
        self._groups: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        self._ours: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        me = weakref.ref(self)  # the hooks must not keep the model's state alive

        def before_step(optimizer: torch.optim.Optimizer, _: Any, __: Any) -> None:
            watch = me()
            if watch is not None and runtime.is_initialized() and watch.holds(optimizer) and watch._listener:
                watch._listener.before_step(optimizer)

        def after_step(optimizer: torch.optim.Optimizer, _: Any, __: Any) -> None:
            watch = me()
            if watch is not None and optimizer in watch._ours:
                watch.steps += 1
                if watch._listener is not None:
                    watch._listener.after_step(optimizer)

        handles = (
            register_optimizer_step_pre_hook(opaque(before_step)),
            register_optimizer_step_post_hook(opaque(after_step)),
        )

        def end() -> None:
            for handle in handles:
                handle.remove()

        #: Hear of no further step.
        self.end = weakref.finalize(self, end)

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Those that have been seen."""
        return list(self._ours)

    def holds(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether it has some of the parameters; the first time that it does, the listener hears of it."""
        if self._groups.get(optimizer) == len(optimizer.param_groups):
            return optimizer in self._ours
        self._groups[optimizer] = len(optimizer.param_groups)
        if optimizer not in self._ours and any(True for _ in self.held_by(optimizer)):
            self._ours.add(optimizer)
            if self._listener is not None:
                self._listener.appears(optimizer, had_stepped=_has_stepped(optimizer))
        return optimizer in self._ours

    def held_by(self, optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
        """Those of the parameters that it has."""
        return (p for group in optimizer.param_groups for p in group["params"] if id(p) in self._parameters)

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


@dataclass
class _Seen:
    """An optimizer. ``unexchanged``: steps since ``signs`` on ``gradients`` of this rank alone."""

    signs: int = 0
    unexchanged: int = 0
    gradients: str = ""


class UnexchangedSteps:
    """Refuses steps on gradients that nobody has exchanged.

    StateError before a step inside of a backward pass, and before the second in a row on gradients that are new and
    were not exchanged. Whoever exchanges adds to ``signs`` what shows that gradients come to it: an exchange, or an
    accumulation without one that the user asked for. ``excused()`` is asked before the error: whether the user has said
    that gradients stay local, or that was not known so far.
    """

    def __init__(self, driver: StepDriver, excused: Callable[[], bool]) -> None:
        self.signs = 0
        self._driver = driver
        self._excused = excused
        self._seen: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Seen] = weakref.WeakKeyDictionary()

    def check(self, optimizer: torch.optim.Optimizer, parameters: Iterable[torch.Tensor]) -> None:
        """The optimizer is about to step on these; more than once makes no difference."""
        refuse_inside_backward()
        seen = self._seen.setdefault(optimizer, _Seen())
        if seen.signs != self.signs:
            seen.signs, seen.unexchanged, seen.gradients = self.signs, 0, ""
            return
        # To the end of this function nothing is cheap, and no training comes here twice.
        gradients = _described(parameters)
        if not gradients or gradients == seen.gradients or self._driver.error is not None:
            return  # nothing was set since
        seen.unexchanged += 1
        seen.gradients = gradients
        if self._excused() or seen.unexchanged < 2:
            return
        error = StateError(
            f"{type(optimizer).__name__} steps a second time on gradients that were not exchanged: parameters of "
            "different ranks drift apart. Either the wrapper is bypassed, as by ddp.module(x) in place of ddp(x), or "
            "by a plain optimizer beside the DistributedOptimizer. Or the loop trains a model that the optimizer does "
            "not hold, from which gradients are copied. If they are averaged in another way, step under no_sync()"
        )
        self._driver.fail(error)
        raise error


def _described(parameters: Iterable[torch.Tensor]) -> str:
    """The gradients' norms, coarsely; empty if there is none but zeros."""
    norms = [float(p.grad.detach().float().norm()) for p in parameters if p.grad is not None]
    return ", ".join(f"{norm:.3g}" for norm in norms) if any(norms) else ""
