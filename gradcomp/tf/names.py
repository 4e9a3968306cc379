"""Horovod's names that gradcomp.tf and gradcomp.tf.keras both have, and those that they refuse, with reasons."""

from __future__ import annotations

from collections.abc import Mapping

from gradcomp.job import names
from gradcomp.job.names import *  # noqa: F403 - those that gradcomp.torch has too
from gradcomp.tf.objects import broadcast_global_variables
from gradcomp.tf.runtime import gloo_built, init

__all__ = ["broadcast_global_variables", "gloo_built", "init"]
__all__ += names.__all__

_HELPER = "a helper of Horovod's own modules"
_MODULE = "modules inside the package are gradcomp's own; import names from gradcomp.tf"
#: Names in horovod.tensorflow.
TF: Mapping[str, str] = {
    "BroadcastGlobalVariablesHook": "a hook for sessions of TensorFlow 1; call broadcast_variables(model.variables)",
    **dict.fromkeys(
        (
            "LocalGradientAggregationHelper", "check_extension", "check_num_rank_power_of_2", "gpu_available",
            "handle_average_backwards_compatibility", "refs_to_vars", "split_list", "vars_to_refs",
        ),
        _HELPER,
    ),
    **dict.fromkeys(
        (
            "compression", "functions", "gradient_aggregation", "gradient_aggregation_eager", "mpi_ops",
            "sync_batch_norm", "util",
        ),
        _MODULE,
    ),
}  # fmt: skip
#: Names in horovod.keras and horovod.tensorflow.keras.
KERAS: Mapping[str, str] = {"is_version_greater_equal_than": _HELPER}
#: Names in their modules ``callbacks``.
CALLBACKS: Mapping[str, str] = {
    "BestModelCheckpoint": "it is for Horovod's Spark estimators, which set its path; put keras.callbacks."
    "ModelCheckpoint(path, save_best_only=True) behind MetricAverageCallback on one rank",
    "is_version_greater_equal_than": _HELPER,
}
