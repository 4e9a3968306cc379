"""What wraps what: modules around modules, and functions that torch.compile must not look into."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.nn.parallel import DistributedDataParallel

F = TypeVar("F", bound=Callable[..., Any])


def opaque(function: F, *, calls_own: bool = False) -> F:
    """The function, at which torch.compile breaks its graph; ``calls_own``: it may look into what that calls.

    Not to be called at import: it imports torch._dynamo, which takes two seconds, and which optimizers import anyway.
    """
    disable: Any = torch.compiler.disable
    disabled: F = disable(function, recursive=not calls_own)
    return disabled


def bare(model: torch.nn.Module) -> torch.nn.Module:
    """The module inside DistributedDataParallel, compiled ones and both; the module itself if it is in none."""
    while (inner := _inside(model)) is not None:
        model = inner
    return model


def _inside(model: torch.nn.Module) -> torch.nn.Module | None:
    inner = model.module if isinstance(model, DistributedDataParallel) else getattr(model, "_orig_mod", None)
    return inner if isinstance(inner, torch.nn.Module) else None
