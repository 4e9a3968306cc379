"""gradcomp for TensorFlow and Keras 3: ``import gradcomp.tf as gc``."""

from typing import TYPE_CHECKING

import gradcomp
import gradcomp.tf.requires  # before anything that imports TensorFlow, so that its error names the package

# isort: split
from gradcomp import *  # noqa: F403 - its public names are public here too
from gradcomp.core.errors import HorovodInternalError, HostsUpdatedInterrupt
from gradcomp.job.checkpoint import load, save
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
from gradcomp.tf import callbacks, local
from gradcomp.tf.bridge import typed_errors
from gradcomp.tf.collectives import (
    allgather,
    allreduce,
    alltoall,
    barrier,
    broadcast,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    local_rank_op,
    local_size_op,
    process_set_included_op,
    rank_op,
    reducescatter,
    size_op,
)
from gradcomp.tf.objects import (
    allgather_object,
    broadcast_,
    broadcast_global_variables,
    broadcast_object,
    broadcast_object_fn,
    broadcast_variables,
)
from gradcomp.tf.optimizer import DistributedOptimizer
from gradcomp.tf.runtime import gloo_built, init, join
from gradcomp.tf.saving import CompressionState, load_model
from gradcomp.tf.sync_batch_norm import SyncBatchNormalization
from gradcomp.tf.tape import DistributedGradientTape, PartialDistributedGradientTape

if TYPE_CHECKING:
    from gradcomp.contrib.record_gradients import record_gradients

__getattr__ = local.refusing(__name__, local.TF)

__all__ = [
    "Adasum",
    "Average",
    "CompressionState",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "Max",
    "Min",
    "PartialDistributedGradientTape",
    "ProcessSet",
    "Product",
    "ReduceOp",
    "Sum",
    "SyncBatchNormalization",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "callbacks",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "load",
    "load_model",
    "local_rank",
    "local_rank_op",
    "local_size",
    "local_size_op",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "process_set_included_op",
    "rank",
    "rank_op",
    "record_gradients",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "save",
    "shutdown",
    "size",
    "size_op",
    "start_timeline",
    "stop_timeline",
    "typed_errors",
]
__all__ += gradcomp.__all__
