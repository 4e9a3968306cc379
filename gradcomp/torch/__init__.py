"""gradcomp for PyTorch: ``import gradcomp.torch as gc``."""

from typing import TYPE_CHECKING

import gradcomp
import gradcomp.torch.requires  # before anything that imports torch, so that its error names the extra
from gradcomp import *  # noqa: F403 - its public names are public here too
from gradcomp.core.errors import HorovodInternalError, HostsUpdatedInterrupt, MissingNameError
from gradcomp.core.registry import CONTRIB, contributed
from gradcomp.job.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from gradcomp.job.reduce_op import Adasum, Average, Max, Min, Product, ReduceOp, Sum
from gradcomp.job.runtime import (
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_enabled,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    rocm_built,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)
from gradcomp.torch.async_calls import Handle, poll, synchronize
from gradcomp.torch.broadcast_state import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from gradcomp.torch.collectives import (
    allgather,
    allgather_async,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    alltoall,
    alltoall_async,
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather,
    grouped_allgather_async,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
    sparse_allreduce_async,
)
from gradcomp.torch.ddp import ddp_comm_hook
from gradcomp.torch.optimizer import DistributedOptimizer
from gradcomp.torch.runtime import gloo_built, init, join
from gradcomp.torch.saving import load, save
from gradcomp.torch.sharded import ShardedCompression, compress_fsdp
from gradcomp.torch.sync_batch_norm import SyncBatchNorm

if TYPE_CHECKING:
    from gradcomp.contrib.post_momentum import PostMomentumSGD
    from gradcomp.contrib.record_gradients import record_gradients

#: Horovod's names that gradcomp lacks, with the advice that the error gives.
_INSTEAD = {
    "elastic": "the ranks of a job are fixed. A job that loses a rank ends; start a new one and resume from a "
    "checkpoint, which gradcomp.torch.save() writes and load() reads"
}


def __getattr__(name: str) -> object:
    if name in _INSTEAD:
        raise MissingNameError(f"gradcomp.torch has no {name}: {_INSTEAD[name]}")
    if name in __all__ and name in CONTRIB:
        return contributed(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "Adasum",
    "Average",
    "DistributedOptimizer",
    "Handle",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "Max",
    "Min",
    "PostMomentumSGD",
    "ProcessSet",
    "Product",
    "ReduceOp",
    "ShardedCompression",
    "Sum",
    "SyncBatchNorm",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "compress_fsdp",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "ddp_comm_hook",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "load",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "record_gradients",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "save",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]
__all__ += gradcomp.__all__
