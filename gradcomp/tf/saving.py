"""Saved models that train on, and compression state in TensorFlow's checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from gradcomp.compress import Compression, Compressor, Policy
from gradcomp.core.errors import ConfigError
from gradcomp.job.checkpoint import keeper_of
from gradcomp.job.plain import from_plain, to_plain
from gradcomp.tf.objects import decode, encode
from gradcomp.tf.optimizer import DistributedOptimizer


def load_model(
    filepath: str | Path,
    compression: Policy | Compressor | str = Compression.none,
    *,
    custom_objects: Mapping[str, Any] | None = None,
    safe_mode: bool = True,
    **arguments: Any,
) -> Any:
    """``keras.saving.load_model``, and make the model's optimizer a distributed one, with its slots.

    Compiled as it was saved, but never with XLA. ``arguments``: further ones of :func:`DistributedOptimizer`. The file
    holds the plain optimizer: unless :func:`gradcomp.tf.load` brings the compression state back, residuals start from
    zero, and the first step says so.
    Collective. Raises ConfigError if the model was saved without an optimizer, and as :func:`DistributedOptimizer`.
    """
    model = keras.saving.load_model(
        filepath, custom_objects=None if custom_objects is None else dict(custom_objects), safe_mode=safe_mode
    )
    if getattr(model, "optimizer", None) is None:
        raise ConfigError(f"{filepath}: the model was saved without an optimizer; compile it with one")
    optimizer = DistributedOptimizer(model.optimizer, compression, **arguments)
    model.jit_compile = False
    if optimizer.built:
        keeper_of(optimizer).state_is_due()
    return model


class CompressionState(tf.train.experimental.PythonState):  # type: ignore[misc]
    """This rank's compression state, for ``tf.train.Checkpoint(..., compression=gc.CompressionState(optimizer))``.

    Residuals, step, plan, the controller's memory. Every rank saves to, and restores from, a path of its own, all at
    the same step; the number of ranks stays. The optimizer must be built before the checkpoint is restored. Local.
    Raises ConfigError if ``optimizer`` is not distributed, StateError if it is not built or the state does not fit.
    """

    def __init__(self, optimizer: Any) -> None:
        super().__init__()
        if getattr(optimizer, "_gradcomp", None) is None:
            raise ConfigError(f"expected what DistributedOptimizer returned, got {type(optimizer).__name__}")
        self._optimizer = optimizer

    def serialize(self) -> bytes:
        """The state as bytes."""
        return encode(to_plain(keeper_of(self._optimizer).snapshot()))

    def deserialize(self, string_value: bytes) -> None:
        """Go on from what :meth:`serialize` gave."""
        keeper_of(self._optimizer).restore(from_plain(decode(string_value)))
