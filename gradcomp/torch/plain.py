"""Compression state as ``torch.save`` takes and ``torch.load(weights_only=True)`` gives it: with tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from gradcomp.job.keeper import Keeper
from gradcomp.job.plain import from_plain, to_plain


def state_of(keeper: Keeper) -> dict[str, Any]:
    """The keeper's snapshot as tensors, numbers and strings."""
    plain: dict[str, Any] = _tensors(to_plain(keeper.snapshot()))
    return plain


def load_state(keeper: Keeper, plain: Any) -> None:
    """Inverse of :func:`state_of`; StateError for anything else."""
    keeper.restore(from_plain(_arrays(plain)))


def _tensors(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _tensors(item) for key, item in value.items()}
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value


def _arrays(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _arrays(item) for key, item in value.items()}
    return value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else value
