"""gradcomp under the names of horovod.keras and horovod.tensorflow.keras: ``import gradcomp.tf.keras as hvd``."""

import gradcomp
from gradcomp import *  # noqa: F403 - its public names are public here too
from gradcomp.core.errors import HorovodInternalError, HostsUpdatedInterrupt
from gradcomp.job.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from gradcomp.job.reduce_op import Adasum, Average, Max, Min, Product, Sum
from gradcomp.job.runtime import (
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_enabled,
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
from gradcomp.tf import local
from gradcomp.tf.keras import callbacks
from gradcomp.tf.keras.optimizers import DistributedOptimizer, PartialDistributedOptimizer, load_model
from gradcomp.tf.keras.values import allgather, allreduce, broadcast, reducescatter
from gradcomp.tf.objects import broadcast_global_variables
from gradcomp.tf.runtime import gloo_built, init

__getattr__ = local.refusing(__name__, local.KERAS)

__all__ = [  # noqa: PLE0604
    *(name for name in gradcomp.__all__ if name != "__version__"),
    "Adasum",
    "Average",
    "DistributedOptimizer",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "Max",
    "Min",
    "PartialDistributedOptimizer",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allreduce",
    "broadcast",
    "broadcast_global_variables",
    "callbacks",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_initialized",
    "load_model",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]
