"""Horovod's names that gradcomp lacks, with the advice that the error gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NoReturn

from gradcomp.core.errors import MissingNameError

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


def refusing(module: str, reasons: Mapping[str, str]) -> Callable[[str], NoReturn]:
    """Return a module's ``__getattr__``, which tells why a name is missing."""

    def refuse(name: str) -> NoReturn:
        reason = reasons.get(name)
        if reason is None:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        raise MissingNameError(f"{module} has no {name!r}: {reason}")

    return refuse
