"""Callbacks for ``keras.Model.fit``, available as ``gc.callbacks``."""

from gradcomp.tf.callbacks.backup import BackupAndRestore
from gradcomp.tf.callbacks.broadcast import BroadcastGlobalVariables
from gradcomp.tf.callbacks.learning_rate import LearningRateSchedule, LearningRateWarmup
from gradcomp.tf.callbacks.metrics import MetricAverage
from gradcomp.tf.callbacks.progress import Progress

__all__ = [
    "BackupAndRestore",
    "BroadcastGlobalVariables",
    "LearningRateSchedule",
    "LearningRateWarmup",
    "MetricAverage",
    "Progress",
]
