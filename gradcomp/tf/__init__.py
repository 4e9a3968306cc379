"""gradcomp for TensorFlow and Keras 3: ``import gradcomp.tf as gc``."""

from typing import TYPE_CHECKING

import gradcomp
import gradcomp.tf.bridge  # before anything else that imports TensorFlow, so that its error names the package

# isort: split
from gradcomp import *  # noqa: F403 - its public names are public here too
from gradcomp.job.checkpoint import load, save
from gradcomp.job.names import refusing
from gradcomp.job.preemption import handle_preemption
from gradcomp.job.reduce_op import ReduceOp
from gradcomp.job.runtime import is_homogeneous
from gradcomp.tf import callbacks, collectives, elastic, names, objects
from gradcomp.tf.bridge import typed_errors
from gradcomp.tf.collectives import *  # noqa: F403
from gradcomp.tf.joining import join
from gradcomp.tf.local_presets import DiLoCo, SparseLoCo
from gradcomp.tf.local_steps import LocalSteps
from gradcomp.tf.names import *  # noqa: F403 - those that gradcomp.tf.keras has too
from gradcomp.tf.objects import *  # noqa: F403
from gradcomp.tf.optimizer import DistributedOptimizer
from gradcomp.tf.runtime import preempted
from gradcomp.tf.saving import CompressionState, load_model
from gradcomp.tf.sensitivity import Sensitivity
from gradcomp.tf.sync_batch_norm import SyncBatchNormalization
from gradcomp.tf.tape import DistributedGradientTape, PartialDistributedGradientTape

if TYPE_CHECKING:
    from gradcomp.contrib.record_gradients import record_gradients

__getattr__ = refusing(__name__, names.TF)

__all__ = [
    "CompressionState", "DiLoCo", "DistributedGradientTape", "DistributedOptimizer", "LocalSteps",
    "PartialDistributedGradientTape", "ReduceOp", "Sensitivity", "SparseLoCo", "SyncBatchNormalization", "callbacks",
    "elastic", "handle_preemption", "is_homogeneous", "join", "load", "load_model", "preempted", "record_gradients",
    "save", "typed_errors",
]  # fmt: skip
__all__ += collectives.__all__
__all__ += objects.__all__
__all__ += names.__all__
__all__ += gradcomp.__all__
