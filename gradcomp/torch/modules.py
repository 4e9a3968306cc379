"""The module that other modules are wrapped around."""

from __future__ import annotations

import torch
from torch.nn.parallel import DistributedDataParallel


def bare(model: torch.nn.Module) -> torch.nn.Module:
    """The module inside DistributedDataParallel, compiled ones and both; the module itself if it is in none."""
    while (inner := _inside(model)) is not None:
        model = inner
    return model


def _inside(model: torch.nn.Module) -> torch.nn.Module | None:
    inner = model.module if isinstance(model, DistributedDataParallel) else getattr(model, "_orig_mod", None)
    return inner if isinstance(inner, torch.nn.Module) else None
