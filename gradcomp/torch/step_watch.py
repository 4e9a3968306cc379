"""The steps of optimizers on parameters whose gradients are exchanged, for those whom no optimizer tells."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from gradcomp.core.errors import StateError
from gradcomp.job import runtime
from gradcomp.job.step_driver import StepDriver
from gradcomp.torch.fingerprint import scalars_of

_INSIDE = (
    "an optimizer steps inside backward(), as from a hook by register_post_accumulate_grad_hook(): there, gradients "
    "are this rank's alone, and their means are exchanged until backward() returns. Take the hook away, and call "
    "step() behind backward()"
)


def refuse_inside_backward() -> None:
    """StateError where autograd runs a backward pass on this thread."""
    if torch._C._current_graph_task_id() != -1:
        raise StateError(_INSIDE)


@dataclass
class _Seen:
    """An optimizer. ``groups``: how many it had when it was looked at, for further ones may have our parameters."""

    groups: int = -1
    ours: bool = False
    signs: int = 0  # when it last stepped
    unexchanged: int = 0  # steps since, on gradients of this rank alone
    gradients: str = ""  # in the last of these


class StepWatch:
    """Hears of the steps of all optimizers that hold some of the parameters, before and after them.

    StateError before a step inside of a backward pass, and before the second in a row on gradients that are new and
    were not exchanged. Whoever exchanges adds to ``signs`` what shows that gradients come to it: an exchange, or an
    accumulation without one that the user asked for. ``excused()`` is asked before the error: whether the user has said
    that gradients stay local, or that was not known so far.
    """

    def __init__(
        self, parameters: Iterable[torch.nn.Parameter], driver: StepDriver, excused: Callable[[], bool]
    ) -> None:
        self.signs = 0
        self._parameters = {id(parameter) for parameter in parameters}
        self._driver = driver
        self._excused = excused
        self._seen: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Seen] = weakref.WeakKeyDictionary()
        self._ours: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()  # that have stepped
        self._stepped = False
        me = weakref.ref(self)  # the hooks must not keep the model's state alive

        def before_step(optimizer: torch.optim.Optimizer, _: Any, __: Any) -> None:
            watch = me()
            if watch is not None and runtime.is_initialized():
                watch.before_step(optimizer)

        def after_step(optimizer: torch.optim.Optimizer, _: Any, __: Any) -> None:
            watch = me()
            if watch is not None and watch._look_at(optimizer).ours:
                watch._ours.add(optimizer)
                watch._stepped = True

        handles = register_optimizer_step_pre_hook(before_step), register_optimizer_step_post_hook(after_step)

        def end() -> None:
            for handle in handles:
                handle.remove()

        self.end = weakref.finalize(self, end)

    def scalars(self) -> str:
        """The settings of those that have stepped, as text; they have no order of their own."""
        return f"[{', '.join(sorted(scalars_of([optimizer])[1:-1] for optimizer in self._ours))}]"

    def stepped(self) -> bool | None:
        """Whether one has stepped since the last call; None if parameters change without optimizers, or did so far."""
        stepped, self._stepped = self._stepped, False
        return stepped if self._ours else None

    def _look_at(self, optimizer: torch.optim.Optimizer) -> _Seen:
        seen = self._seen.get(optimizer)
        if seen is None:
            seen = self._seen[optimizer] = _Seen()
        if seen.groups != len(optimizer.param_groups):
            seen.groups = len(optimizer.param_groups)
            seen.ours = any(True for _ in self._ours_of(optimizer))
        return seen

    def _ours_of(self, optimizer: torch.optim.Optimizer) -> Iterable[torch.nn.Parameter]:
        return (p for group in optimizer.param_groups for p in group["params"] if id(p) in self._parameters)

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """One is about to step; more than once makes no difference."""
        seen = self._look_at(optimizer)
        if not seen.ours:
            return
        refuse_inside_backward()
        if seen.signs != self.signs:
            seen.signs, seen.unexchanged, seen.gradients = self.signs, 0, ""
            return
        # To the end of this function nothing is cheap, and no training comes here twice.
        gradients = _described(self._ours_of(optimizer))
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


def _described(parameters: Iterable[torch.nn.Parameter]) -> str:
    """The gradients' norms, coarsely; empty if there is none but zeros."""
    norms = [float(p.grad.detach().float().norm()) for p in parameters if p.grad is not None]
    return ", ".join(f"{norm:.3g}" for norm in norms) if any(norms) else ""
