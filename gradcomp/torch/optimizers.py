"""An exchange watches an optimizer: its momentum, its settings and its steps."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, finalize, ref

import numpy as np
import numpy.typing as npt
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from gradcomp.compress import Policy
from gradcomp.core.errors import StateError
from gradcomp.exchange.driver import Phase, StepDriver
from gradcomp.exchange.pipeline import Pipeline
from gradcomp.job import momentum, runtime
from gradcomp.job.momentum import LOOKS_AHEAD, NO_SUM, Group
from gradcomp.torch.layers import Named
from gradcomp.torch.modules import opaque, refuse_inside_backward


class Momenta:
    """The momentum of the layers ``named``, which the groups of ``optimizers()`` hold.

    Optimizers may gain groups, but a group must neither gain nor lose parameters.
    """

    def __init__(self, named: Named, optimizers: Callable[[], Sequence[torch.optim.Optimizer]]) -> None:
        self._layers = {id(parameter): layer for layer, (_, parameter) in enumerate(named)}
        self._optimizers = optimizers
        # Optimizers and their numbers of groups, from which the next two are computed.
        self._known: list[int] = []
        self._groups: list[tuple[torch.optim.Optimizer, int]] = []
        self._group_of = np.full(len(named), -1)
        self._without: list[tuple[torch.optim.Optimizer, int]] = []
        self._withheld: list[tuple[dict[str, Any], Any]] = []

    def of_step(self, pipeline: Pipeline) -> npt.NDArray[np.float64] | None:
        """Return the momentum by layer for the exchange that is laid out, or None if no compressor needs it.

        See :func:`gradcomp.job.momentum.momenta`.
        """
        self.give_back()
        self._without = []
        if not pipeline.momenta.any():
            return None
        self._assign()
        groups = [_group(optimizer, optimizer.param_groups[number]) for optimizer, number in self._groups]
        by_layer, without = momentum.momenta(pipeline, groups, self._group_of)
        self._without = [self._groups[number] for number in without]
        return by_layer

    def _assign(self) -> None:
        optimizers = self._optimizers()
        known = [number for each in optimizers for number in (id(each), len(each.param_groups))]
        if known == self._known:
            return
        self._known = known
        self._groups = [(each, number) for each in optimizers for number in range(len(each.param_groups))]
        self._group_of[:] = -1
        for place, (optimizer, number) in enumerate(self._groups):
            for parameter in optimizer.param_groups[number]["params"]:
                if (layer := self._layers.get(id(parameter))) is not None:
                    self._group_of[layer] = place

    def withhold(self, optimizer: torch.optim.Optimizer) -> None:
        """Set the momentum of groups to 0 where the exchange has applied it, until :meth:`give_back`."""
        for one, number in self._without:
            if one is optimizer:
                group = optimizer.param_groups[number]
                self._withheld.append((group, group["momentum"]))
                group["momentum"] = 0.0

    def give_back(self) -> None:
        """Restore the user's momentum after the step, for schedulers and checkpoints to find."""
        for group, value in self._withheld:
            if group["momentum"] == 0.0:
                group["momentum"] = value
        self._withheld = []


def warn_if_it_averages(optimizer: torch.optim.Optimizer, policy: Policy) -> None:
    """Warn if compression adds up gradients and the optimizer averages them over steps, as Adam does."""
    if any(group.get("betas") for group in optimizer.param_groups):
        momentum.warn_of_averages(policy, type(optimizer).__name__)


def _group(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> Group:
    kind = type(optimizer).__name__
    problem = ""
    if not isinstance(optimizer, torch.optim.SGD):
        problem = NO_SUM % (kind, "torch.optim.SGD")
    elif group["nesterov"]:
        problem = LOOKS_AHEAD
    elif group["dampening"]:
        problem = "dampening is not known before compression: give dampening=0"
    return Group(kind, float(group.get("momentum") or 0.0), problem)


def settings_of(group: dict[str, Any]) -> dict[str, Any]:
    """Return what a parameter group has besides its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def share_settings(source: torch.optim.Optimizer, target: torch.optim.Optimizer) -> None:
    """Give the groups of one optimizer the settings of another's, such as the rates that a scheduler has changed."""
    for mine, theirs in zip(source.param_groups, target.param_groups, strict=True):
        theirs.update(settings_of(mine))


def scalars_of(optimizers: Iterable[torch.optim.Optimizer]) -> str:
    """Return the numeric settings of each parameter group (rates, momentum, decay) as JSON.

    Tensors on a device are left out, because reading them would wait for the device. Settings whose name
    contains "rank" are left out too: they differ between ranks in optimizers that share work.
    """
    return json.dumps(
        [
            {
                name: number
                for name in optimizer.defaults
                if "rank" not in name and (number := _number(group.get(name))) is not None
            }
            for optimizer in optimizers
            for group in optimizer.param_groups
        ]
    )


def _number(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.item() if value.device.type == "cpu" and value.numel() == 1 else None
    if isinstance(value, tuple | list):
        return [_number(each) for each in value]
    return value if isinstance(value, float | int) else None


class Listener:
    """Learns of the steps of optimizers that hold some of the watched parameters."""

    def appears(self, optimizer: torch.optim.Optimizer, *, had_stepped: bool) -> None:
        """Called when an optimizer is first seen; ``had_stepped`` if its own or loaded state shows earlier steps."""

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Called before the optimizer steps; an exception propagates from its ``step()``."""

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Called after the optimizer has stepped."""


class StepWatch:
    """Counts the steps of all optimizers that hold some of the parameters, and tells the listener of them."""

    def __init__(self, parameters: Iterable[torch.Tensor], listener: Listener | None = None) -> None:
        #: The number of steps of all these optimizers together.
        self.steps = 0
        self._told = 0
        self._parameters = {id(parameter) for parameter in parameters}
        self._listener = listener
        #: Optimizer -> number of its parameter groups when it was last checked; after a change it is checked again.
        self._groups: WeakKeyDictionary[torch.optim.Optimizer, int] = WeakKeyDictionary()
        self.ours: WeakSet[torch.optim.Optimizer] = WeakSet()
        me = ref(self)  # the hooks must not keep the model's state alive

        def before_step(optimizer: torch.optim.Optimizer, _: Any, __: Any) -> None:
            watch = me()
            if watch is not None and runtime.is_initialized() and watch.holds(optimizer) and watch._listener:
                watch._listener.before_step(optimizer)

        def after_step(optimizer: torch.optim.Optimizer, _: Any, __: Any) -> None:
            watch = me()
            if watch is not None and optimizer in watch.ours:
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
        self.end = finalize(self, end)

    def holds(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return True if the optimizer holds some of the parameters; the first time, tell the listener."""
        if self._groups.get(optimizer) == len(optimizer.param_groups):
            return optimizer in self.ours
        self._groups[optimizer] = len(optimizer.param_groups)
        if optimizer not in self.ours and any(True for _ in self.held_by(optimizer)):
            self.ours.add(optimizer)
            if self._listener is not None:
                self._listener.appears(optimizer, had_stepped=_has_stepped(optimizer))
        return optimizer in self.ours

    def held_by(self, optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
        """Yield the watched parameters that the optimizer holds."""
        return (p for group in optimizer.param_groups for p in group["params"] if id(p) in self._parameters)

    def scalars(self) -> str:
        """Return the settings of the optimizers as text, sorted because their order differs between ranks."""
        return f"[{', '.join(sorted(scalars_of([optimizer])[1:-1] for optimizer in self.ours))}]"

    def stepped(self) -> bool | None:
        """Return True if an optimizer has stepped since the last call; None if none was ever seen.

        None does not mean that the parameters did not change: a script may update them without an optimizer.
        """
        stepped, self._told = self.steps > self._told, self.steps
        return stepped if self.ours else None


def _has_stepped(optimizer: torch.optim.Optimizer) -> bool:
    """Infer from its state whether an optimizer has stepped.

    If a state has a step count, the count decides, because some optimizers create their state in the constructor.
    """
    for state in optimizer.state.values():
        if isinstance(state, dict):
            steps = state.get("step")
            if any(kept is not None for kept in state.values()) if steps is None else float(steps) > 0:
                return True
    return False


@dataclass
class _Seen:
    """The record that :class:`UnexchangedSteps` keeps of one optimizer.

    ``signs`` is the value of :attr:`UnexchangedSteps.signs` at the last check. ``unexchanged`` counts the optimizer's
    steps, since that value last changed, on gradients that were not exchanged; ``gradients`` describes the last ones.
    """

    signs: int = 0
    unexchanged: int = 0
    gradients: str = ""


class UnexchangedSteps:
    """Refuses steps on gradients that were not exchanged.

    Raises StateError before a step inside a backward pass, and before the second step in a row on new
    gradients that were not exchanged. ``signs`` counts events that show that the owner sees
    the gradients: the owner increments it after an exchange, and when gradients accumulate without one on purpose, as
    under ``no_sync()``. ``excused()`` is called before every step on new gradients that were not exchanged. It returns
    True, which allows the step, if gradients are local on purpose, or if the owner could not know that before.
    """

    def __init__(self, driver: StepDriver, excused: Callable[[], bool]) -> None:
        self.signs = 0
        self._driver = driver
        self._excused = excused
        self._seen: WeakKeyDictionary[torch.optim.Optimizer, _Seen] = WeakKeyDictionary()

    def check(self, optimizer: torch.optim.Optimizer, parameters: Iterable[torch.Tensor]) -> None:
        """Check an optimizer that is about to step on these parameters.

        A repeated check of one step has no effect.
        """
        refuse_inside_backward()
        seen = self._seen.setdefault(optimizer, _Seen())
        if seen.signs != self.signs:
            seen.signs, seen.unexchanged, seen.gradients = self.signs, 0, ""
            return
        # The rest is slow. A loop that exchanges its gradients before every step has returned above.
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
            "different ranks drift apart. The usual causes: the loop calls ddp.module(x) in place of ddp(x); a plain "
            "optimizer steps in addition to the DistributedOptimizer; or the loop trains a model that the optimizer "
            "does not hold, and copies its gradients. If gradients are averaged in another way, step under no_sync()"
        )
        self._driver.fail(error)
        raise error


def _described(parameters: Iterable[torch.Tensor]) -> str:
    """Describe the gradients by their norms, to three digits; empty if all are zero or None."""
    norms = [float(p.grad.detach().float().norm()) for p in parameters if p.grad is not None]
    return ", ".join(f"{norm:.3g}" for norm in norms) if any(norms) else ""
