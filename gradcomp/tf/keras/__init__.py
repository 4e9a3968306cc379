"""gradcomp under the names of horovod.keras and horovod.tensorflow.keras: ``import gradcomp.tf.keras as hvd``.

Functions take the arguments of ``horovod.keras``, which are fewer than in ``gradcomp.tf`` and in another order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import keras

import gradcomp
from gradcomp import *  # noqa: F403 - its public names are public here too
from gradcomp.compress import Compression, Compressor, Policy
from gradcomp.core.errors import ConfigError
from gradcomp.job.names import refusing
from gradcomp.job.process_sets import Members
from gradcomp.job.reduce_op import Average, ReduceOp
from gradcomp.tf import collectives, elastic, names, saving
from gradcomp.tf import optimizer as wrapped
from gradcomp.tf.keras import callbacks
from gradcomp.tf.names import *  # noqa: F403 - the names that gradcomp.tf has too

Optimizer = TypeVar("Optimizer", bound="keras.optimizers.Optimizer")

__getattr__ = refusing(__name__, names.KERAS)

__all__ = [  # noqa: PLE0604
    *(name for name in gradcomp.__all__ if name != "__version__"),
    "DistributedOptimizer",
    "PartialDistributedOptimizer",
    "allgather",
    "allreduce",
    "broadcast",
    "callbacks",
    "elastic",
    "load_model",
    "reducescatter",
]
__all__ += names.__all__


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

    ``arguments`` are keyword arguments that Horovod's function does not have.
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

    ``local_layers`` is a Keras layer or a list of layers, which need not be built yet. All else is as in
    :func:`DistributedOptimizer`.
    """
    return DistributedOptimizer(
        optimizer, name, device_dense, device_sparse, compression, sparse_as_dense, gradient_predivide_factor, op,
        groups=groups, process_set=process_set, scale_local_gradients=scale_local_gradients,
        local_layers=local_layers, **arguments,
    )  # fmt: skip


def load_model(
    filepath: str | Path,
    custom_optimizers: Iterable[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: Policy | Compressor | str = Compression.none,
    legacy_opts: bool = False,
    **arguments: Any,
) -> Any:
    """Load a Keras model and make its optimizer a distributed one, as :func:`gradcomp.tf.load_model` does.

    ``custom_optimizers`` are optimizer classes that Keras does not know; they are found by their class names.
    ``custom_objects`` are all other classes and functions that it does not know. ``arguments`` are further
    arguments of :func:`gradcomp.tf.load_model`. Raises ConfigError for ``legacy_opts=True``, because Keras 3
    has no legacy optimizers.
    """
    if legacy_opts:
        raise ConfigError(
            "legacy_opts=True: Keras 3 has no tf.keras.optimizers.legacy; leave legacy_opts out"
        )
    known = {kind.__name__: kind for kind in custom_optimizers or ()} | dict(custom_objects or {})
    return saving.load_model(filepath, compression, custom_objects=known or None, **arguments)


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: ReduceOp | None = None,
    compression: Any = Compression.none,
) -> Any:
    """Reduce ``value``, converted to a tensor, as :func:`gradcomp.tf.allreduce` does."""
    return collectives.allreduce(
        value, average, "", "", compression, op, prescale_factor, postscale_factor, name
    )


def allgather(value: Any, name: str | None = None) -> Any:
    """Gather ``value``, converted to a tensor, as :func:`gradcomp.tf.allgather` does."""
    return collectives.allgather(value, name)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """Broadcast ``value``, converted to a tensor, as :func:`gradcomp.tf.broadcast` does."""
    return collectives.broadcast(value, root_rank, name)


def reducescatter(value: Any, name: str | None = None, op: ReduceOp = Average) -> Any:
    """Reduce and scatter ``value``, converted to a tensor, as :func:`gradcomp.tf.reducescatter` does."""
    return collectives.reducescatter(value, op=op, name=name)
