"""Unwraps modules, and hides functions from torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.nn.parallel import DistributedDataParallel

F = TypeVar("F", bound=Callable[..., Any])


def opaque(function: F, *, calls_own: bool = False) -> F:
    """Return the function such that torch.compile breaks its graph there.

    With ``calls_own`` torch.compile may trace the functions that it calls. Do not call this at import: it
    imports torch._dynamo, which takes two seconds, and which optimizers import anyway.
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
