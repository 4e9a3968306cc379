"""Detects a second exchange of the same gradients: a DistributedDataParallel, or another hook on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakSet, finalize, ref

import torch
from torch.autograd.graph import get_gradient_edge
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from gradcomp.core.errors import ConfigError
from gradcomp.torch.live import live
from gradcomp.torch.modules import bare, opaque

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


class DdpCheck:
    """Refuses a DistributedDataParallel that exchanges gradients of ``parameters``, until the first exchange ends.

    It is refused when it runs: one that is only left over from earlier does no harm. The check does not hook
    every module's forward pass, because compiled models would be recompiled when that hook is removed.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._ours = {id(parameter): ref(parameter) for parameter in parameters}
        self._made_since: WeakSet[DistributedDataParallel] = WeakSet()
        self._hooks: list[Any] = [register_module_module_registration_hook(opaque(self._assembled))]
        if _have_autograd_state(parameters):
            for ddp in live(DistributedDataParallel):
                self._hooks.append(ddp.register_forward_pre_hook(self._run))

    def first_gradient(self) -> None:
        """Raise ConfigError if a DistributedDataParallel was made since, which may run without its forward pass."""
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
    """Refuse a second communication hook on a DistributedDataParallel around ``model``, in either order.

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
