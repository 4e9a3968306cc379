"""``DistributedOptimizer`` with the order of arguments of ``horovod.keras``, and what loads a model with one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import keras

from gradcomp.compress import Compression, Compressor, Policy
from gradcomp.core.errors import ConfigError
from gradcomp.job.process_sets import Members
from gradcomp.job.reduce_op import Average, ReduceOp
from gradcomp.tf import optimizer as wrapped
from gradcomp.tf import saving

Optimizer = TypeVar("Optimizer", bound="keras.optimizers.Optimizer")


def DistributedOptimizer(
    optimizer: Optimizer,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Policy | Compressor | str = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: ReduceOp = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Members = None,
    scale_local_gradients: bool = True,
    **arguments: Any,
) -> Optimizer:
    """:func:`gradcomp.tf.DistributedOptimizer`; ``arguments`` are gradcomp's own, by keyword."""
    return wrapped.DistributedOptimizer(
        optimizer, name, False, device_dense, device_sparse, compression, sparse_as_dense,
        backward_passes_per_step, op, gradient_predivide_factor, average_aggregated_gradients, num_groups,
        groups, process_set, scale_local_gradients, **arguments,
    )  # fmt: skip


def PartialDistributedOptimizer(
    optimizer: Optimizer,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Policy | Compressor | str = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: ReduceOp = Average,
    groups: Any = None,
    process_set: Members = None,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
    **arguments: Any,
) -> Optimizer:
    """As :func:`DistributedOptimizer`, but for the variables of ``local_layers``: those gradients stay each rank's.

    ``local_layers``: a layer of Keras or a list of them, built or not.
    """
    return wrapped.DistributedOptimizer(
        optimizer,
        name,
        False,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
        local_layers=local_layers,
        **arguments,
    )


def load_model(
    filepath: str | Path,
    custom_optimizers: Iterable[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: Policy | Compressor | str = Compression.none,
    legacy_opts: bool = False,
    **arguments: Any,
) -> Any:
    """:func:`gradcomp.tf.load_model`, which makes the model's optimizer a distributed one, of a file of plain Keras.

    ``custom_optimizers``: classes of optimizers that Keras does not know, found by their names. ``custom_objects``: all
    other classes and functions that it does not know. ``arguments``: further ones of :func:`gradcomp.tf.load_model`.
    ConfigError for ``legacy_opts=True``: Keras 3 has no such optimizers.
    """
    if legacy_opts:
        raise ConfigError("legacy_opts=True: Keras 3 has no tf.keras.optimizers.legacy")
    known = {kind.__name__: kind for kind in custom_optimizers or ()}
    known.update(custom_objects or {})
    return saving.load_model(filepath, compression, custom_objects=known or None, **arguments)
