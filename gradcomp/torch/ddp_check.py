"""Whether DistributedDataParallel exchanges the gradients that ``DistributedOptimizer`` is to exchange."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakSet, ref

import torch
from torch.autograd.graph import get_gradient_edge
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from gradcomp.core.errors import ConfigError
from gradcomp.torch.live import live

_MARK = "gradcomp"

_REFUSAL = """\
the optimizer's parameters are in a DistributedDataParallel, which averages the same gradients at the same time: \
ranks would apply different ones. With DistributedDataParallel, keep the optimizer as it is, without \
DistributedOptimizer, and let a hook compress the gradients:
    state, hook = gc.ddp_comm_hook(model, compression=...)
    model = torch.nn.parallel.DistributedDataParallel(model)
    model.register_comm_hook(state, hook)
(Trainers that make the DistributedDataParallel themselves: register the hook on the model that they return.) Or leave \
DistributedDataParallel away, and keep DistributedOptimizer"""


class DdpCheck:
    """Refuses a DistributedDataParallel that exchanges gradients of ``parameters``, until the first exchange has ended.

    It is refused when it is run: one that is only left over from earlier does no harm. There is no hook on every
    module's forward pass, for compiled models would be compiled once more when that goes.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._ours = {id(parameter): ref(parameter) for parameter in parameters}
        self._made_since: WeakSet[DistributedDataParallel] = WeakSet()
        self._hooks: list[Any] = [register_module_module_registration_hook(self._assembled)]
        if _have_autograd_state(parameters):
            for ddp in live(DistributedDataParallel):
                self._hooks.append(ddp.register_forward_pre_hook(self._run))

    def first_gradient(self) -> None:
        """ConfigError if a DistributedDataParallel was made since that is run by other means than its forward pass."""
        for ddp in self._made_since:
            self._run(ddp)

    def end(self) -> None:
        """The first exchange has ended; what holds then goes on to hold."""
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
        found = self._ours.get(id(parameter))  # the number may be that of a parameter that is gone
        return found is not None and found() is parameter


def _have_autograd_state(parameters: Sequence[torch.nn.Parameter]) -> bool:
    """Whether somebody keeps the graph's node of one of these parameters: a graph, or DistributedDataParallel."""
    for parameter in parameters:
        _node_data(parameter)[_MARK] = True
    return any(_MARK in _node_data(parameter) for parameter in parameters)


def _node_data(parameter: torch.nn.Parameter) -> dict[Any, Any]:
    """A dictionary that lives as long as the node at which the parameter's gradient arrives."""
    node: Any = get_gradient_edge(parameter).node
    data: dict[Any, Any] = node.metadata
    return data
