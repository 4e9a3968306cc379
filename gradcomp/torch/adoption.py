"""How an optimizer becomes a distributed one in place, and a plain one again in copies and pickles."""

from __future__ import annotations

import copy
import copyreg
from typing import Any, ClassVar

import torch

from gradcomp.core.errors import ConfigError, StateError
from gradcomp.torch.modules import opaque


class Adopted:
    """What is put in front of an optimizer's class; ``_gradcomp`` is what the optimizer has beside its own.

    ``is_opaque``: methods that torch.compile must not look into. ``calls_own``: the same, but for the method of the
    optimizer's own that they call.
    """

    _gradcomp: Any
    is_opaque: ClassVar[tuple[str, ...]] = ()
    calls_own: ClassVar[tuple[str, ...]] = ()

    @property
    def _parameter_names(self) -> dict[torch.Tensor, str]:
        """Horovod's: what each parameter is called, here a position where no name was given."""
        names: dict[torch.Tensor, str] = self._gradcomp.parameter_names
        return names

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and pickles are plain optimizers of the wrapped class: an exchange cannot be copied."""
        # copyreg's function, so that a pickle loads where gradcomp is not installed.
        return copyreg._reconstructor, (_base(type(self)), object, None), self.__getstate__()  # type: ignore[attr-defined]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A plain optimizer with parameters of its own."""
        base: Any = _base(type(self))
        plain = base.__new__(base)
        memo[id(self)] = plain
        plain.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return plain


def check_plain(optimizer: Any) -> None:
    """ConfigError for what is no optimizer, StateError for one that is distributed already."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"expected a torch.optim.Optimizer, got {type(optimizer).__name__}")
    if hasattr(optimizer, "_gradcomp"):
        raise StateError("this optimizer is already a DistributedOptimizer")


def adopt(optimizer: torch.optim.Optimizer, mixin: type[Adopted], core: Any) -> None:
    """Put a class in front of the optimizer's own: schedulers and users that hold it go on holding it."""
    kind = type(optimizer)
    # A scheduler made before may have put a bound ``step`` on the instance, which would bypass ours.
    optimizer.__dict__.pop("step", None)
    optimizer.__dict__["_gradcomp"] = core
    hidden = {name: opaque(getattr(mixin, name), calls_own=True) for name in mixin.calls_own}
    hidden |= {name: opaque(getattr(mixin, name)) for name in mixin.is_opaque}
    optimizer.__class__ = type(
        kind.__name__, (mixin, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__, **hidden}
    )


def _base(kind: type) -> type:
    """The class that was wrapped."""
    wrapped: type = kind.__bases__[1]
    return wrapped
