"""gradcomp for PyTorch: ``import gradcomp.torch as gc``."""

from typing import TYPE_CHECKING

import gradcomp
import gradcomp.torch.requires  # before anything that imports torch, so that its error names the extra
from gradcomp import *  # noqa: F403 - its public names are public here too
from gradcomp.job import names
from gradcomp.job.names import *  # noqa: F403 - those that gradcomp.tf has too
from gradcomp.job.preemption import handle_preemption
from gradcomp.job.reduce_op import ReduceOp
from gradcomp.job.runtime import is_homogeneous, preempted
from gradcomp.torch import elastic
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
from gradcomp.torch.joining import join
from gradcomp.torch.local_presets import DiLoCo, SparseLoCo
from gradcomp.torch.local_steps import LocalSteps
from gradcomp.torch.optimizer import DistributedOptimizer
from gradcomp.torch.runtime import gloo_built, init
from gradcomp.torch.saving import load, save
from gradcomp.torch.sensitivity import Sensitivity
from gradcomp.torch.sharded import ShardedCompression, compress_fsdp
from gradcomp.torch.sync_batch_norm import SyncBatchNorm
from gradcomp.torch.zero import ZeroOptimizer

if TYPE_CHECKING:
    from gradcomp.contrib.post_momentum import PostMomentumSGD
    from gradcomp.contrib.record_gradients import record_gradients

__getattr__ = names.refusing(__name__, {})

__all__ = [
    "DiLoCo", "DistributedOptimizer", "Handle", "LocalSteps", "PostMomentumSGD", "ReduceOp", "Sensitivity",
    "ShardedCompression", "SparseLoCo", "SyncBatchNorm", "ZeroOptimizer", "allgather", "allgather_async",
    "allgather_object", "allreduce", "allreduce_", "allreduce_async", "allreduce_async_", "alltoall", "alltoall_async",
    "barrier", "broadcast", "broadcast_", "broadcast_async", "broadcast_async_", "broadcast_object",
    "broadcast_optimizer_state", "broadcast_parameters", "compress_fsdp", "ddp_comm_hook", "elastic", "gloo_built",
    "grouped_allgather", "grouped_allgather_async", "grouped_allreduce", "grouped_allreduce_",
    "grouped_allreduce_async", "grouped_allreduce_async_", "grouped_reducescatter", "grouped_reducescatter_async",
    "handle_preemption", "init", "is_homogeneous", "join", "load", "poll", "preempted", "record_gradients",
    "reducescatter", "reducescatter_async", "save", "sparse_allreduce_async", "synchronize",
]  # fmt: skip
__all__ += names.__all__
__all__ += gradcomp.__all__
