"""Parameters that are about to change: whatever reads one of them first makes the change happen."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from functools import cache
from typing import Any, Protocol

import torch

from gradcomp.core.errors import ConfigError

COMPILED = "torch.compile runs in this process, and compiled code reads parameters without asking"
_Tensor: Any = torch.Tensor
#: Functions that read no value of a parameter: gradients are zeroed and shapes compared while a mean is under way.
_OF_GRADIENT = frozenset([_Tensor.grad.__get__, _Tensor.grad.__set__, _Tensor.grad.__delete__])
_WITHOUT_VALUES = frozenset(
    getattr(_Tensor, name).__get__
    for name in ("requires_grad", "shape", "dtype", "device", "layout", "is_sparse", "is_leaf")
)


class Owner(Protocol):
    """Changes parameters, of which it knows the numbers."""

    def use(self, layer: int) -> None:
        """Change this parameter, and call :func:`restore`: it is about to be used."""

    def complete(self) -> None:
        """Change all parameters that are awaited."""


#: Awaited parameters by id.
_awaited: dict[int, tuple[Owner, int]] = {}


def refused(why: str) -> ConfigError:
    return ConfigError(f'finish="forward": {why}; use finish="backward"')


class _Awaited:
    """Mixed into the class of a parameter that is awaited.

    PyTorch calls ``__torch_function__`` of such a class before any of its functions reads the parameter: a module's
    forward, a function of ``torch.nn.functional``, ``detach()`` in a ``state_dict()``, ``copy_``. The owner changes the
    parameter there, which gets its own class back. So it does not matter which module, or whether one, uses it.
    """

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.compiler.is_compiling():
            raise refused(COMPILED)
        kwargs = kwargs or {}
        if func in _OF_GRADIENT or (func in _WITHOUT_VALUES and torch.is_grad_enabled()):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if not _used(args) + _used(kwargs.values()):
            for owner in {owner for owner, _ in _awaited.values()}:
                owner.complete()
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        _used([self])
        return copy.deepcopy(self, memo)


def _used(values: Iterable[Any]) -> int:
    """Have the awaited parameters among these values changed; return how many there are."""
    count = 0
    for value in values:
        if isinstance(value, _Awaited):
            if id(value) in _awaited:
                owner, layer = _awaited[id(value)]
                owner.use(layer)
            else:  # somebody has made a tensor of the same class
                restore(value)
            count += 1
        elif isinstance(value, list | tuple):
            count += _used(value)
        elif isinstance(value, dict):
            count += _used(value.values())
    return count


def wait_for_use(parameter: torch.nn.Parameter, owner: Owner, layer: int) -> None:
    """Call ``owner.use(layer)`` before the parameter is used. The owner keeps the parameter alive."""
    kind: Any = type(parameter)
    parameter.__class__ = _class_of(kind)
    _awaited[id(parameter)] = owner, layer


def restore(parameter: Any) -> None:
    """Give a parameter its own class back."""
    _awaited.pop(id(parameter), None)
    parameter.__class__ = type(parameter).__mro__[2]


@cache
def _class_of(kind: Any) -> type:
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__slots__": ()}
    found: type = type(kind)(kind.__name__, (_Awaited, kind), names)
    return found
