"""gradcomp for TensorFlow and Keras 3: ``import gradcomp.tf as gc``."""

import gradcomp
import gradcomp.tf.require  # the first of what imports TensorFlow

# isort: split
from gradcomp import *  # noqa: F403 - its public names are public here too
from gradcomp.job.checkpoint import load, save
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
from gradcomp.tf import callbacks
from gradcomp.tf.bridge import typed_errors
from gradcomp.tf.collectives import allgather, allreduce, alltoall, barrier, broadcast, reducescatter
from gradcomp.tf.objects import broadcast_object
from gradcomp.tf.optimizer import DistributedOptimizer
from gradcomp.tf.runtime import init
from gradcomp.tf.saving import CompressionState, load_model
from gradcomp.tf.tape import DistributedGradientTape
from gradcomp.tf.variables import broadcast_variables

__all__ = [  # noqa: PLE0604
    *(name for name in gradcomp.__all__ if name != "__version__"),
    "Average",
    "CompressionState",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "ProcessSet",
    "Sum",
    "allgather",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_object",
    "broadcast_variables",
    "callbacks",
    "cross_rank",
    "cross_size",
    "init",
    "is_initialized",
    "load",
    "load_model",
    "local_rank",
    "local_size",
    "rank",
    "record_gradients",
    "reducescatter",
    "save",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
    "typed_errors",
]
