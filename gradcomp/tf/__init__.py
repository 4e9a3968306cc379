"""gradcomp for TensorFlow and Keras 3: ``import gradcomp.tf as gc``."""

import gradcomp
import gradcomp.tf.requires
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

__all__ = [
    "DGC",
    "EF21",
    "LGC",
    "NUQSGD",
    "Accordion",
    "AdaComp",
    "AdaQS",
    "Assignment",
    "Auto",
    "Average",
    "Bayes",
    "BestRank",
    "BlockFloat",
    "CLTk",
    "Cast",
    "Codebook",
    "Compression",
    "CompressionState",
    "Compressor",
    "Config",
    "ConfigError",
    "Controller",
    "DensitySchedule",
    "DeviceError",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "ErrorFeedback",
    "Filter",
    "FixedPlan",
    "GlobalTopK",
    "GraVAC",
    "GradcompError",
    "GroupArray",
    "Identity",
    "KMeans",
    "LGreCo",
    "LayerSpec",
    "Linear",
    "LocalClip",
    "MomentumCorrection",
    "OneBit",
    "Plan",
    "PlanMismatchError",
    "Policy",
    "PowerSGD",
    "ProcessSet",
    "Quantize",
    "RandomBlock",
    "RandomK",
    "RedSync",
    "SIDCo",
    "ScaledSign",
    "Schedule",
    "Signum",
    "SpectralAtomo",
    "StateError",
    "Sum",
    "TernGrad",
    "Threshold",
    "TopK",
    "TransportError",
    "TwoLevelSelection",
    "UnbiasedRank",
    "Warmup",
    "WireFormatError",
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

# Those that the list, which type checkers read, does not name yet.
__all__ += [name for name in gradcomp.__all__ if name not in (*__all__, "__version__")]
