"""Loads saved models for further training, and keeps compression state in TensorFlow's checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from gradcomp.compress import Compression, Compressor, Policy
from gradcomp.core.errors import ConfigError, StateError
from gradcomp.exchange import checkpoint
from gradcomp.exchange.checkpoint_manager import checkpoint_manager_of
from gradcomp.job import runtime
from gradcomp.job.checkpoint import from_plain, load, to_plain
from gradcomp.job.process_sets import Members, members
from gradcomp.tf.keras_model import core_of
from gradcomp.tf.objects import broadcast_object, decode, encode
from gradcomp.tf.optimizer import Arguments, distribute


def load_model(
    filepath: str | Path,
    compression: Policy | Compressor | str = Compression.none,
    *,
    compression_state: str | Path | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    safe_mode: bool = True,
    **arguments: Any,
) -> Any:
    """Load a Keras model, and make its optimizer a distributed one, with its slots.

    The model is compiled as it was saved, but never with XLA. ``compression_state`` is the directory of
    :func:`gradcomp.tf.save`, with which training continues bit for bit. The model's file contains the plain
    optimizer, so without that directory residuals start from zero, and the first step warns. Layers have the
    names that they had when the state was saved, which not all paths of variables keep. ``arguments`` are
    further ones of :func:`DistributedOptimizer`. Collective. Raises ConfigError if the model was saved
    without an optimizer, and as :func:`DistributedOptimizer` does; StateError on every rank as
    :func:`gradcomp.tf.load` does.
    """
    model = keras.saving.load_model(
        filepath, custom_objects=None if custom_objects is None else dict(custom_objects), safe_mode=safe_mode
    )
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None:
        raise ConfigError(
            f"{filepath}: the model was saved without an optimizer; compile it with one, then save it"
        )
    names = None
    if compression_state is not None:
        names = _names_in(Path(compression_state), arguments.get("process_set"))
    distribute(optimizer, Arguments(compression, names=names, **arguments))
    model.jit_compile = False
    if not optimizer.built:
        optimizer.build(model.trainable_variables)
    if compression_state is None:
        checkpoint_manager_of(optimizer).state_is_due()
    else:
        load(compression_state, optimizer)
    return model


def _names_in(directory: Path, process_set: Members) -> list[str] | None:
    """Return on every rank the layer names of a saved compression state; None if there is none that loads."""
    ranks = members(process_set)
    names = None
    if runtime.rank() == ranks[0]:
        with suppress(StateError, OSError):
            last = directory / checkpoint.last(directory)
            names = list(checkpoint.Manifest.from_text(checkpoint.read_manifest(last)).shared.layers)
    found: list[str] | None = broadcast_object(names, ranks[0], process_set=process_set)
    return found


class CompressionState(tf.train.experimental.PythonState):
    """This rank's compression state, for ``tf.train.Checkpoint(..., compression=gc.CompressionState(optimizer))``.

    It holds residuals, step, plan and the controller's state. Every rank saves to, and restores from, a path
    of its own, all at the same step; the number of ranks must not change. The optimizer must be built before
    the checkpoint is restored. Local. Raises ConfigError if ``optimizer`` is not distributed, StateError if
    it is not built or the state does not fit.
    """

    def __init__(self, optimizer: Any) -> None:
        super().__init__()
        if core_of(optimizer) is None:
            raise ConfigError(f"expected a DistributedOptimizer, got {type(optimizer).__name__}")
        self._optimizer = optimizer

    def serialize(self) -> bytes:
        """Return the state as bytes, see :func:`gradcomp.tf.objects.encode`."""
        return encode(to_plain(checkpoint_manager_of(self._optimizer).snapshot()))

    def deserialize(self, string_value: bytes) -> None:
        """Resume from the bytes that :meth:`serialize` returned."""
        checkpoint_manager_of(self._optimizer).restore(from_plain(decode(string_value)))
