"""Compression state in the form that ``torch.save`` and ``torch.load(weights_only=True)`` take: with tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from gradcomp.exchange.checkpoint_manager import CheckpointManager
from gradcomp.job.checkpoint import from_plain, to_plain


def state_of(checkpoint_manager: CheckpointManager) -> dict[str, Any]:
    """Return the checkpoint manager's snapshot as tensors, numbers and strings."""
    plain: dict[str, Any] = _tensors(to_plain(checkpoint_manager.snapshot()))
    return plain


def load_state(checkpoint_manager: CheckpointManager, plain: Any) -> None:
    """Restore a snapshot that :func:`state_of` returned; raise StateError for anything else."""
    checkpoint_manager.restore(from_plain(_arrays(plain)))


def _tensors(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _tensors(item) for key, item in value.items()}
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value


def _arrays(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _arrays(item) for key, item in value.items()}
    return value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else value
