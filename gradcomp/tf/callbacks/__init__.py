"""Callbacks for ``keras.Model.fit``, available as ``gc.callbacks``."""

from gradcomp.tf.callbacks.backup import BackupAndRestore
from gradcomp.tf.callbacks.common import BroadcastGlobalVariables, MetricAverage, Progress
from gradcomp.tf.callbacks.learning_rate import LearningRateSchedule, LearningRateWarmup

__all__ = [
    "BackupAndRestore",
    "BroadcastGlobalVariables",
    "LearningRateSchedule",
    "LearningRateWarmup",
    "MetricAverage",
    "Progress",
]
