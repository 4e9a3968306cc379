"""Finds and unwraps modules, watches optimizer steps, and refuses gradients that are averaged twice or not at all."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar
from weakref import WeakKeyDictionary, WeakSet, finalize, ref

import torch
from torch.autograd.graph import get_gradient_edge
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from gradcomp.core.errors import ConfigError, StateError
from gradcomp.exchange.driver import Phase, StepDriver
from gradcomp.job import runtime
from gradcomp.torch.fingerprint import scalars_of

T = TypeVar("T")

F = TypeVar("F", bound=Callable[..., Any])
_STEP_IN_BACKWARD = (
    "an optimizer steps inside backward(), perhaps from a register_post_accumulate_grad_hook(). Until backward() "
    "returns, gradients are this rank's alone and their means are being exchanged: remove the hook, and call step() "
    "after backward()"
)
_MARK = "gradcomp"
_REFUSAL = """\
the optimizer's parameters are in a DistributedDataParallel, which averages the same gradients at the same time: \
ranks would apply different ones. With DistributedDataParallel, keep the optimizer as it is, without \
DistributedOptimizer, and let a hook compress the gradients:
    state, hook = gc.ddp_comm_hook(model, compression=...)
    model = torch.nn.parallel.DistributedDataParallel(model)
    model.register_comm_hook(state, hook)
(If a trainer makes the DistributedDataParallel itself, register the hook on the model that it returns.) Or keep \
DistributedOptimizer, and remove DistributedDataParallel"""
_TWO_HOOKS = """\
a DistributedDataParallel takes one communication hook: {there} is registered, and {new} would be the second. To keep \
gradcomp's, remove the other (Accelerate registers one for DistributedDataParallelKwargs(comm_hook=...), Lightning \
for DDPStrategy(ddp_comm_hook=...), DistributedDataParallel itself for mixed_precision=...); gradcomp has compressions \
like theirs: ddp_comm_hook(model, compression="bf16"), "fp16" or "powersgd:rank=4". To keep the other, do not \
register gradcomp's"""


def live(kind: type[T]) -> list[T]:
    """Return the instances of ``kind`` that the program still refers to.

    It visits every object that Python's garbage collector tracks: about 50 ms for half a million. Objects
    that ``gc.freeze()`` has set aside are not found.
    """
    if not _instances(kind):
        return []
    gc.collect()  # frees instances that are only kept alive by reference cycles
    return _instances(kind)


def _instances(kind: type[T]) -> list[T]:
    # type() is used because isinstance() reads an object's __class__, which runs code in proxies.
    kinds: set[type[Any]] = set()
    _add_with_subclasses(kind, kinds)
    objects = gc.get_objects()
    if kinds.isdisjoint(map(type, objects)):  # the usual case, made fast
        return []
    return [each for each in objects if type(each) in kinds]


def _add_with_subclasses(kind: type[Any], kinds: set[type[Any]]) -> None:
    if kind not in kinds:
        kinds.add(kind)
        for subclass in kind.__subclasses__():
            _add_with_subclasses(subclass, kinds)


def opaque(function: F, *, calls_own: bool = False) -> F:
    """Return the function wrapped so that torch.compile does not trace it, but breaks its graph at each call.

    With ``calls_own`` torch.compile may trace the functions that ``function`` calls. Do not call this at import,
    because it imports torch._dynamo, which takes two seconds. Constructing an optimizer imports that anyway.
    """
    disable: Any = torch.compiler.disable
    disabled: F = disable(function, recursive=not calls_own)
    return disabled


def bare(model: torch.nn.Module) -> torch.nn.Module:
    """Return the module inside DistributedDataParallel, compiled modules, or both; else the module itself."""
    while (inner := _inside(model)) is not None:
        model = inner
    return model


def _inside(model: torch.nn.Module) -> torch.nn.Module | None:
    inner = model.module if isinstance(model, DistributedDataParallel) else getattr(model, "_orig_mod", None)
    return inner if isinstance(inner, torch.nn.Module) else None


def refuse_inside_backward() -> None:
    """Raise StateError if autograd runs a backward pass on this thread."""
    if torch._C._current_graph_task_id() != -1:
        raise StateError(_STEP_IN_BACKWARD)


class Listener(Protocol):
    """Learns of the steps of optimizers that hold some of the watched parameters."""

    def appears(self, optimizer: torch.optim.Optimizer, *, had_stepped: bool) -> None:
        """Called when an optimizer is first seen; ``had_stepped`` if its own or loaded state shows earlier steps."""
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
        #: Optimizer -> number of its parameter groups when it was last checked; after a change it is checked again.
        self._groups: WeakKeyDictionary[torch.optim.Optimizer, int] = WeakKeyDictionary()
        self._ours: WeakSet[torch.optim.Optimizer] = WeakSet()
        me = ref(self)  # the hooks must not keep the model's state alive

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
        self.end = finalize(self, end)

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

        None does not mean that the parameters did not change: a script may update them without an optimizer.
        """
        stepped, self._told = self.steps > self._told, self.steps
        return stepped if self._ours else None


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
            "optimizer steps beside the DistributedOptimizer; or the loop trains a model that the optimizer does not "
            "hold, and copies its gradients. If gradients are averaged in another way, step under no_sync()"
        )
        self._driver.fail(error)
        raise error


def _described(parameters: Iterable[torch.Tensor]) -> str:
    """Describe the gradients by their norms, to three digits; empty if all are zero or None."""
    norms = [float(p.grad.detach().float().norm()) for p in parameters if p.grad is not None]
    return ", ".join(f"{norm:.3g}" for norm in norms) if any(norms) else ""


class DdpCheck:
    """Refuses a DistributedDataParallel that exchanges gradients of ``parameters``, until the first exchange ends.

    It is refused when it runs; one that still exists but no longer runs does no harm. The check does not use a global
    forward hook for all modules, because compiled models would be recompiled when that hook is removed.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._ours = {id(parameter): ref(parameter) for parameter in parameters}
        self._made_since: WeakSet[DistributedDataParallel] = WeakSet()
        self._hooks: list[Any] = [register_module_module_registration_hook(opaque(self._assembled))]
        if _have_autograd_state(parameters):
            for ddp in live(DistributedDataParallel):
                self._hooks.append(ddp.register_forward_pre_hook(self._run))

    def first_gradient(self) -> None:
        """Raise ConfigError if a DistributedDataParallel of these parameters was made since this check began.

        Its forward pre-hook may not have been called.
        """
        for ddp in self._made_since:
            self._run(ddp)

    def end(self) -> None:
        """Remove the hooks, because the first exchange has ended and later steps run the same modules."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._made_since.clear()

    def _assembled(self, module: torch.nn.Module, _name: str, _part: Any) -> None:
        if isinstance(module, DistributedDataParallel) and module not in self._made_since:
            self._made_since.add(module)
            self._hooks.append(module.register_forward_pre_hook(self._run))

    def _run(self, ddp: torch.nn.Module, *_: Any) -> None:
        assert isinstance(ddp, DistributedDataParallel)
        for name, parameter in ddp.module.named_parameters():
            if name not in ddp.parameters_to_ignore and self._is_ours(parameter):
                raise ConfigError(_REFUSAL)

    def _is_ours(self, parameter: torch.nn.Parameter) -> bool:
        found = self._ours.get(id(parameter))  # the id may be that of a parameter that was freed
        return found is not None and found() is parameter


def _have_autograd_state(parameters: Sequence[torch.nn.Parameter]) -> bool:
    """Return True if something keeps the gradient accumulator of one of these parameters alive.

    That is a graph or a DistributedDataParallel. A value that is set in the metadata of a node survives only
    where the node does.
    """
    for parameter in parameters:
        _node_data(parameter)[_MARK] = True
    return any(_MARK in _node_data(parameter) for parameter in parameters)


def _node_data(parameter: torch.nn.Parameter) -> dict[Any, Any]:
    """Return the metadata of the parameter's gradient accumulator, which lives as long as that node."""
    node: Any = get_gradient_edge(parameter).node
    data: dict[Any, Any] = node.metadata
    return data


def allow_one_hook(model: torch.nn.Module) -> None:
    """Refuse a second communication hook on a DistributedDataParallel around ``model``, whichever hook comes first.

    torch's own error says that a hook can be registered once, and names none. ``model`` may be the
    DistributedDataParallel, or be wrapped in one later.
    """
    if isinstance(model, DistributedDataParallel):
        _refuse_second_hook(model)
        return
    inside = ref(bare(model))
    for ddp in live(DistributedDataParallel):
        if bare(ddp) is inside():
            _refuse_second_hook(ddp)

    def assembled(module: torch.nn.Module, _name: str, part: Any) -> None:
        if (
            isinstance(module, DistributedDataParallel)
            and isinstance(part, torch.nn.Module)
            and bare(part) is inside()
        ):
            _refuse_second_hook(module)

    finalize(bare(model), register_module_module_registration_hook(opaque(assembled)).remove)


def _refuse_second_hook(ddp: DistributedDataParallel) -> None:
    """Replace this instance's methods that register hooks by ones that first check for a registered hook."""
    me: Any = ref(ddp)
    kind: Any = DistributedDataParallel

    def register(state: object, hook: Any) -> None:
        _check_alone(me(), f"{hook.__module__}.{hook.__qualname__}")
        kind.register_comm_hook(me(), state, hook)

    def register_builtin(which: Any) -> None:
        _check_alone(me(), str(which))
        kind._register_builtin_comm_hook(me(), which)

    ddp.__dict__.update(register_comm_hook=register, _register_builtin_comm_hook=register_builtin)


def _check_alone(ddp: Any, new: str) -> None:
    there = ddp._get_ddp_logging_data().get("comm_hook")
    if there is not None:
        hook = ddp._comm_hooks[0][0] if ddp._comm_hooks else None
        named = there if hook is None else f"{hook.__module__}.{hook.__qualname__}"
        raise ConfigError(_TWO_HOOKS.format(there=named, new=new))
