"""Compresses gradients in Ray Train: hooks a prepared model, initialises Keras' workers, and reports checkpoints."""

from __future__ import annotations

import os
import socket
import tempfile
from typing import TYPE_CHECKING, Any

from gradcomp.core.errors import need

need(__name__, "ray", "ray")

# isort: split
import ray.train
from ray.train.collective import broadcast_from_rank_zero

from gradcomp.compress import Compression, Compressor, Policy
from gradcomp.control import Controller

if TYPE_CHECKING:
    from gradcomp.torch.ddp import HookState

# The frontends are imported on first use, since a worker of one framework need not have the other.


def compress(
    model: Any,
    compression: Policy | Compressor | str = Compression.none,
    *,
    controller: Controller | str | None = None,
) -> HookState:
    """Compresses the gradients of the model that ``ray.train.torch.prepare_model`` returned, in a ``TorchTrainer``.

    Args:
        model: the prepared model.
        compression: a compressor, its string form, or a :class:`gradcomp.Policy` of them by layer.
        controller: as for :func:`gradcomp.torch.ddp_comm_hook`, which this registers.

    Returns:
        The state of the hook.

    Raises:
        ConfigError: Ray has not wrapped the model in DistributedDataParallel; and the errors of ``ddp_comm_hook``.

    Collective over the workers. Calls ``gc.init()``, which uses the process group that Ray has created, if that was not
    done. Wire: see the compressor.
    """
    from gradcomp.integrations.hooks import register

    return register(model, compression, "Ray", controller=controller)


def report(metrics: dict[str, Any], opt: Any, **arguments: Any) -> None:
    """Calls ``ray.train.report`` with a checkpoint of :func:`gradcomp.torch.save`, and with gradcomp's metrics.

    Every worker writes its part to its own directory, and Ray merges them in its storage, so no worker needs access to
    the others' disks. Collective over the workers, between two steps; raises as ``save``.

    Args:
        metrics: those of the script, to which ``opt.compression_metrics()`` are added.
        opt: the result of :func:`compress` or :func:`gradcomp.torch.DistributedOptimizer`.
        arguments: ``model``, ``optimizer`` and ``extra``, as for ``save``.
    """
    from gradcomp.torch.saving import save

    with tempfile.TemporaryDirectory(prefix="gradcomp-") as directory:
        save(directory, opt, **arguments)
        checkpoint = ray.train.Checkpoint.from_directory(directory)
        ray.train.report({**metrics, **opt.compression_metrics()}, checkpoint=checkpoint)


def load(opt: Any, **arguments: Any) -> dict[str, Any] | None:
    """Continues from the last checkpoint that :func:`report` gave to Ray; returns its ``extra``, or None without one.

    After a failure Ray restarts the workers with that checkpoint. With the same number of workers, training
    continues bit for bit. ``arguments`` are ``model`` and ``optimizer``, as for :func:`gradcomp.torch.load`. Collective
    over the workers; raises the errors of ``load``.
    """
    from gradcomp.torch.saving import load as load_from

    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return None
    with checkpoint.as_directory() as directory:
        return load_from(directory, opt, **arguments)


def init_tensorflow(**settings: Any) -> None:
    """Calls :func:`gradcomp.tf.init` on the workers of a ``TensorflowTrainer``, which connect by torch.distributed.

    The first worker offers a free port of its host; the launch environment (``RANK``, ``MASTER_ADDR`` and so on) is set
    on every worker. Needs torch in addition to TensorFlow. ``settings`` are those of ``init``. Collective over the
    workers; raises the errors of ``init``, and ConfigError if torch is missing.
    """
    context = ray.train.get_context()
    rank = context.get_world_rank()
    place = None
    if rank == 0:
        with socket.socket() as free:
            free.bind(("", 0))
            place = ray.util.get_node_ip_address(), free.getsockname()[1]
    address, port = broadcast_from_rank_zero(place)
    environment = {
        "RANK": rank,
        "WORLD_SIZE": context.get_world_size(),
        "LOCAL_RANK": context.get_local_rank(),
        "LOCAL_WORLD_SIZE": context.get_local_world_size(),
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
    }
    os.environ.update({name: str(value) for name, value in environment.items()})
    from gradcomp.tf.runtime import init

    init(**settings)
