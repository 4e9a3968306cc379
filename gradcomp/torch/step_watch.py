"""Watches the steps of optimizers on parameters whose gradients are exchanged."""

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
from gradcomp.job.step_phases import Phase
from gradcomp.torch.fingerprint import scalars_of
from gradcomp.torch.modules import opaque

_INSIDE = (
    "an optimizer steps inside backward(), perhaps from a register_post_accumulate_grad_hook(). Until backward() "
    "returns, gradients are this rank's alone and their means are being exchanged: remove the hook, and call step() "
    "after backward()"
)


def refuse_inside_backward() -> None:
    """Raise StateError if autograd runs a backward pass on this thread."""
    if torch._C._current_graph_task_id() != -1:
        raise StateError(_INSIDE)


class Listener(Protocol):
    """Learns of the steps of optimizers that hold some of the watched parameters."""

    def appears(self, optimizer: torch.optim.Optimizer, *, had_stepped: bool) -> None:
        """Called when an optimizer is first seen; ``had_stepped`` if it stepped earlier, or loaded such a state."""
        ...

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Called before the optimizer steps; an exception propagates from its ``step()``."""
        ...

    def after_step(self, optimizer: torch.optim.Optimizer) -> None: ...


class StepWatch:
    """Counts the steps of all optimizers that hold some of the parameters, and tells the listener of them."""

    def __init__(self, parameters: Iterable[torch.Tensor], listener: Listener | None = None) -> None:
        #: The number of steps of all these optimizers together.
        self.steps = 0
        self._told = 0
        self._parameters = {id(parameter) for parameter in parameters}
        self._listener = listener
        #: Number of parameter groups when an optimizer was looked at; groups that are added may hold our parameters.
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

        #: Stops watching.
        self.end = weakref.finalize(self, end)

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        return list(self._ours)

    def holds(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return True if the optimizer holds some of the parameters; the first time, tell the listener."""
        if self._groups.get(optimizer) == len(optimizer.param_groups):
            return optimizer in self._ours
        self._groups[optimizer] = len(optimizer.param_groups)
        if optimizer not in self._ours and any(True for _ in self.held_by(optimizer)):
            self._ours.add(optimizer)
            if self._listener is not None:
                self._listener.appears(optimizer, had_stepped=_has_stepped(optimizer))
        return optimizer in self._ours

    def held_by(self, optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
        """Yield the watched parameters that the optimizer holds."""
        return (p for group in optimizer.param_groups for p in group["params"] if id(p) in self._parameters)

    def scalars(self) -> str:
        """Return the settings of the optimizers as text, sorted because their order differs between ranks."""
        return f"[{', '.join(sorted(scalars_of([optimizer])[1:-1] for optimizer in self._ours))}]"

    def stepped(self) -> bool | None:
        """Return True if an optimizer has stepped since the last call; None if none was ever seen.

        Parameters may change without an optimizer.
        """
        stepped, self._told = self.steps > self._told, self.steps
        return stepped if self._ours else None


def _has_stepped(optimizer: torch.optim.Optimizer) -> bool:
    """Infer from its state whether an optimizer has stepped.

    A step count decides where there is one, because some optimizers make their state when they are made.
    """
    for state in optimizer.state.values():
        if isinstance(state, dict):
            steps = state.get("step")
            if any(kept is not None for kept in state.values()) if steps is None else float(steps) > 0:
                return True
    return False


@dataclass
class _Seen:
    """The checks of one optimizer.

    ``unexchanged`` counts its steps since ``signs`` on gradients that were not exchanged; ``gradients``
    describes the last of these.
    """

    signs: int = 0
    unexchanged: int = 0
    gradients: str = ""


class UnexchangedSteps:
    """Refuses steps on gradients that were not exchanged.

    Raises StateError before a step inside a backward pass, and before the second step in a row on new
    gradients that were not exchanged. The owner adds to ``signs`` when gradients reach it: by an exchange, or
    by an accumulation without one that the user asked for. ``excused()`` is called before the error. It
    returns True if the user keeps gradients local on purpose, or if that could not be known before.
    """

    def __init__(self, driver: StepDriver, excused: Callable[[], bool]) -> None:
        self.signs = 0
        self._driver = driver
        self._excused = excused
        self._seen: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Seen] = weakref.WeakKeyDictionary()

    def check(self, optimizer: torch.optim.Optimizer, parameters: Iterable[torch.Tensor]) -> None:
        """Check an optimizer that is about to step on these parameters.

        A repeated check of one step has no effect.
        """
        refuse_inside_backward()
        seen = self._seen.setdefault(optimizer, _Seen())
        if seen.signs != self.signs:
            seen.signs, seen.unexchanged, seen.gradients = self.signs, 0, ""
            return
        # The rest of this function is slow, and a training that exchanges its gradients does not reach it twice.
        gradients = _described(parameters)
        if not gradients or gradients == seen.gradients:
            return  # no gradient has changed since the last check
        if self._driver.phase is Phase.RETIRED or self._driver.exchanger.closed:
            return  # another exchange has the parameters, or the job has ended
        seen.unexchanged += 1
        seen.gradients = gradients
        if self._excused() or seen.unexchanged < 2:
            return
        self._driver.check()  # another rank may have come here first and ended the exchange
        error = StateError(
            f"{type(optimizer).__name__} steps a second time on gradients that were not exchanged: parameters of "
            "different ranks drift apart. Either the wrapper is bypassed, as by ddp.module(x) in place of ddp(x), or "
            "by a plain optimizer beside the DistributedOptimizer. Or the loop trains a model that the optimizer does "
            "not hold, and copies its gradients. If they are averaged in another way, step under no_sync()"
        )
        self._driver.fail(error)
        raise error


def _described(parameters: Iterable[torch.Tensor]) -> str:
    """Describe the gradients by their norms, to three digits; empty if all are zero or None."""
    norms = [float(p.grad.detach().float().norm()) for p in parameters if p.grad is not None]
    return ", ".join(f"{norm:.3g}" for norm in norms) if any(norms) else ""
