"""``DistributedOptimizer`` and ``load_model`` with the arguments of ``horovod.keras``, in its order."""

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
    """Wrap an optimizer as :func:`gradcomp.tf.DistributedOptimizer` does.

    ``arguments`` are gradcomp's own, by keyword.
    """
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
    """Wrap an optimizer, but keep the gradients of the variables of ``local_layers`` on each rank.

    ``local_layers`` is a layer of Keras or a list of them, built or not. Otherwise this is
    :func:`DistributedOptimizer`.
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
    """Load a Keras model and make its optimizer a distributed one, as :func:`gradcomp.tf.load_model` does.

    ``custom_optimizers`` are optimizer classes that Keras does not know, found by their names;
    ``custom_objects`` are all other classes and functions that it does not know. ``arguments`` are further
    ones of :func:`gradcomp.tf.load_model`. Raises ConfigError for ``legacy_opts=True``, because Keras 3 has
    no such optimizers.
    """
    if legacy_opts:
        raise ConfigError(
            "legacy_opts=True: Keras 3 has no tf.keras.optimizers.legacy; leave legacy_opts out"
        )
    known = {kind.__name__: kind for kind in custom_optimizers or ()}
    known.update(custom_objects or {})
    return saving.load_model(filepath, compression, custom_objects=known or None, **arguments)
