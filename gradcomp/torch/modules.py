"""Finds and unwraps modules, calls back after backward passes, and refuses gradients that are averaged twice."""

from __future__ import annotations

import functools
import gc
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar
from weakref import WeakSet, finalize, ref

import torch
from torch.autograd import Variable
from torch.autograd.graph import get_gradient_edge
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from gradcomp.core.errors import ConfigError, StateError

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
register gradcomp's, which a process group of backend="gradcomp" does"""


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
    found: list[type[Any]] = [kind]
    while found:
        kinds.update(found)
        found = [each for one in found for each in one.__subclasses__() if each not in kinds]
    objects = gc.get_objects()
    if kinds.isdisjoint(map(type, objects)):  # the usual case, made fast
        return []
    return [each for each in objects if type(each) in kinds]


def opaque(function: F, *, calls_own: bool = False) -> F:
    """Return the function wrapped so that torch.compile does not trace it, but breaks its graph at each call.

    With ``calls_own`` torch.compile may trace the functions that ``function`` calls. Do not call this at import,
    because it imports torch._dynamo, which takes two seconds. Constructing an optimizer imports that anyway.
    """
    disable: Any = torch.compiler.disable
    disabled: F = disable(function, recursive=not calls_own)
    return disabled


def skipped(function: F) -> F:
    """Return the function itself, marked so that torch.compile does not trace it; it traces what ``function`` calls.

    A call takes no longer than before, as those of opaque functions do.
    """
    from torch._dynamo.decorators import skip  # it imports what opaque() does

    marked: F = skip(function)  # type: ignore[assignment]
    return marked


def bare(model: torch.nn.Module) -> torch.nn.Module:
    """Return the module inside DistributedDataParallel, compiled modules, or both; else the module itself."""
    while True:
        inner = getattr(model, "module" if isinstance(model, DistributedDataParallel) else "_orig_mod", None)
        if not isinstance(inner, torch.nn.Module):
            return model
        model = inner


def refuse_inside_backward() -> None:
    """Raise StateError if autograd runs a backward pass on this thread."""
    if torch._C._current_graph_task_id() != -1:
        raise StateError(_STEP_IN_BACKWARD)


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


class _Running(threading.local):
    """The callbacks of the compiled backward pass that a thread runs; ``ended`` is set once autograd has returned."""

    def __init__(self) -> None:
        self.callbacks: list[Callable[[], None]] = []
        self.ended = False


_running = _Running()


class BeforeBackward(Protocol):
    """Has work to finish before a backward pass."""

    def before_backward(self) -> None:
        """Finish it; called before each backward pass that begins outside of another one."""


#: What :func:`watch_backward` calls before a backward pass.
before_backward: WeakSet[BeforeBackward] = WeakSet()


def at_end(callback: Callable[[], None]) -> None:
    """Call ``callback`` when the running backward pass ends; a callback may add further ones.

    Autograd's engine does that, but drops the callbacks of hooks that compiled autograd calls. Those are called
    when the engine returns: see :func:`watch_backward`.
    """
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    if _running.ended or getattr(compiled, "in_compiled_autograd_region", False):
        _running.callbacks.append(callback)
    else:
        Variable._execution_engine.queue_callback(callback)


def watch_backward() -> None:
    """Patch the function by which Python runs autograd's engine, once, to call back before it and after it."""
    run: Any = torch.autograd._engine_run_backward  # type: ignore[attr-defined]
    if hasattr(run, "of_gradcomp"):
        return

    @functools.wraps(run)
    def run_and_call_back(*arguments: Any, **named: Any) -> Any:
        if before_backward and torch._C._current_graph_task_id() == -1:
            for each in list(before_backward):
                each.before_backward()
        outer, _running.callbacks = _running.callbacks, []
        try:
            found = run(*arguments, **named)
            _running.ended = bool(_running.callbacks)
            for callback in _running.callbacks:  # which grows meanwhile
                callback()
            return found
        finally:
            _running.callbacks, _running.ended = outer, False

    wrapped: Any = opaque(run_and_call_back, calls_own=True)
    wrapped.of_gradcomp = True
    torch.autograd._engine_run_backward = wrapped  # type: ignore[attr-defined]


class EndOfBackward:
    """Calls back at the end of the running backward pass.

    Reentrant checkpoints run backward passes inside the outer one, and autograd calls back at the end of
    each. At the end of an inner pass this object asks again, from the nodes that follow in the outer pass.
    """

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call
        self._hooks: list[Any] = []
        # torch.compile cannot trace what autograd calls. The wrappers are made once, because one takes 0.1 ms.
        self._ended, self._goes_on = opaque(self._one_has_ended), opaque(self._outer_one_goes_on)

    def wait(self) -> None:
        """Queue the callback; called when the backward pass has begun."""
        at_end(self._ended)

    def _one_has_ended(self) -> None:
        # Its annotation wrongly excludes None.
        around: torch.autograd.graph.Node | None = torch._C._current_autograd_node()
        if around is None:
            self._call()
            return
        self._hooks += [
            node.register_prehook(self._goes_on) for node, _ in around.next_functions if node is not None
        ]

    def _outer_one_goes_on(self, _: Any) -> None:
        while self._hooks:
            self._hooks.pop().remove()
        self.wait()
