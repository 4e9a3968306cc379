"""gradcomp for PyTorch: ``import gradcomp.torch as gc``."""

import gradcomp
from gradcomp import *  # noqa: F403 - its public names are public here too
from gradcomp.job.process_sets import ProcessSet
from gradcomp.job.recording import record_gradients
from gradcomp.job.reduce_op import Average, Sum
from gradcomp.job.runtime import (
    cross_rank,
    cross_size,
    is_initialized,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
)
from gradcomp.job.timeline import start_timeline, stop_timeline
from gradcomp.torch.broadcast import broadcast_object, broadcast_optimizer_state, broadcast_parameters
from gradcomp.torch.collectives import (
    allgather,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    barrier,
    poll,
    synchronize,
)
from gradcomp.torch.ddp import ddp_comm_hook
from gradcomp.torch.optimizer import DistributedOptimizer
from gradcomp.torch.post_momentum import PostMomentumSGD
from gradcomp.torch.runtime import init
from gradcomp.torch.saving import load, save
from gradcomp.torch.sharded import ShardedCompression, compress_fsdp
from gradcomp.torch.sync_batch_norm import SyncBatchNorm

__all__ = [  # noqa: PLE0604
    *(name for name in gradcomp.__all__ if name != "__version__"),
    "Average",
    "DistributedOptimizer",
    "PostMomentumSGD",
    "ProcessSet",
    "ShardedCompression",
    "Sum",
    "SyncBatchNorm",
    "allgather",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "barrier",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "compress_fsdp",
    "cross_rank",
    "cross_size",
    "ddp_comm_hook",
    "init",
    "is_initialized",
    "load",
    "local_rank",
    "local_size",
    "poll",
    "rank",
    "record_gradients",
    "save",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]
