"""Horovod's names that gradcomp.tf and gradcomp.tf.keras both have, and those that they refuse, with reasons."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from gradcomp.core.errors import HorovodInternalError, HostsUpdatedInterrupt, MissingNameError
from gradcomp.core.registry import CONTRIB, contributed
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
from gradcomp.tf.objects import broadcast_global_variables
from gradcomp.tf.runtime import gloo_built, init

__all__ = [
    "Adasum", "Average", "HorovodInternalError", "HostsUpdatedInterrupt", "Max", "Min", "ProcessSet",
    "Product", "Sum", "add_process_set", "broadcast_global_variables", "ccl_built", "cross_rank",
    "cross_size", "cuda_built", "ddl_built", "global_process_set", "gloo_built", "gloo_enabled", "init",
    "is_initialized", "local_rank", "local_size", "mpi_built", "mpi_enabled", "mpi_threads_supported",
    "nccl_built", "rank", "remove_process_set", "rocm_built", "shutdown", "size", "start_timeline",
    "stop_timeline",
]  # fmt: skip

ELASTIC = "a job that loses a rank ends; start a new one, which resumes by BackupAndRestore, or by save() and load()"
_HELPER = "a helper of Horovod's own modules"
_MODULE = "modules inside the package are gradcomp's own; import names from gradcomp.tf"
#: Names in horovod.tensorflow.
TF: Mapping[str, str] = {
    "BroadcastGlobalVariablesHook": "a hook for sessions of TensorFlow 1; call broadcast_variables(model.variables)",
    "elastic": ELASTIC,
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
KERAS: Mapping[str, str] = {"elastic": ELASTIC, "is_version_greater_equal_than": _HELPER}
#: Names in their modules ``callbacks``.
CALLBACKS: Mapping[str, str] = {
    "BestModelCheckpoint": "it is for Horovod's Spark estimators, which set its path; put keras.callbacks."
    "ModelCheckpoint(path, save_best_only=True) behind MetricAverageCallback on one rank",
    "is_version_greater_equal_than": _HELPER,
    **dict.fromkeys(("CommitStateCallback", "UpdateBatchStateCallback", "UpdateEpochStateCallback"), ELASTIC),
}


def refusing(module: str, reasons: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a module's ``__getattr__``, which finds what contrib adds and tells why a name is missing."""

    def refuse(name: str) -> Any:
        if name in CONTRIB and name in sys.modules[module].__all__:
            return contributed(name)
        reason = reasons.get(name)
        if reason is None:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        raise MissingNameError(f"{module} has no {name!r}: {reason}")

    return refuse
