"""An optimizer becomes a distributed one in place; its copies and pickles are plain optimizers again."""

from __future__ import annotations

import copy
import copyreg
from typing import Any, ClassVar

import torch

from gradcomp.core.errors import ConfigError, StateError
from gradcomp.torch.modules import opaque


class Adopted:
    """The mixin that goes in front of an optimizer's class; ``_gradcomp`` holds the state that wrapping adds.

    ``is_opaque`` lists methods that torch.compile must not trace. torch.compile does not trace those in
    ``calls_own`` either, but may trace the method of the wrapped class that they call.
    """

    _gradcomp: Any
    is_opaque: ClassVar[tuple[str, ...]] = ()
    calls_own: ClassVar[tuple[str, ...]] = ()

    @property
    def _parameter_names(self) -> dict[torch.Tensor, str]:
        """Horovod's attribute: the name of each parameter, which is a position where the user gave none."""
        names: dict[torch.Tensor, str] = self._gradcomp.parameter_names
        return names

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as a plain optimizer of the wrapped class, because an exchange cannot be copied."""
        # The pickle names a function of copyreg, so that it loads where gradcomp is not installed.
        return copyreg._reconstructor, (_base(type(self)), object, None), self.__getstate__()  # type: ignore[attr-defined]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a plain optimizer with copies of the parameters."""
        base: Any = _base(type(self))
        plain = base.__new__(base)
        memo[id(self)] = plain
        plain.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return plain


def check_plain(optimizer: Any) -> None:
    """Raise ConfigError if this is not an optimizer, StateError if it is wrapped already."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"expected a torch.optim.Optimizer, got {type(optimizer).__name__}")
    if hasattr(optimizer, "_gradcomp"):
        raise StateError("this optimizer is already a DistributedOptimizer; wrap an optimizer once only")


def adopt(optimizer: torch.optim.Optimizer, mixin: type[Adopted], core: Any) -> None:
    """Put ``mixin`` in front of the optimizer's class.

    The object stays the same, so schedulers and users that hold a reference to it need no change.
    """
    kind = type(optimizer)
    # A scheduler that was made before may have set a bound ``step`` on the instance, which would bypass ours.
    optimizer.__dict__.pop("step", None)
    optimizer.__dict__["_gradcomp"] = core
    hidden = {name: opaque(getattr(mixin, name), calls_own=True) for name in mixin.calls_own}
    hidden |= {name: opaque(getattr(mixin, name)) for name in mixin.is_opaque}
    optimizer.__class__ = type(
        kind.__name__, (mixin, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__, **hidden}
    )


def _base(kind: type) -> type:
    wrapped: type = kind.__bases__[1]
    return wrapped
