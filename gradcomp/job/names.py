"""The names of Horovod's that every frontend has: errors, operations, process sets, and questions about the job."""

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

__all__ = [
    "Adasum", "Average", "HorovodInternalError", "HostsUpdatedInterrupt", "Max", "Min", "ProcessSet",
    "Product", "Sum", "add_process_set", "ccl_built", "cross_rank", "cross_size", "cuda_built", "ddl_built",
    "global_process_set", "gloo_enabled", "is_initialized", "local_rank", "local_size", "mpi_built",
    "mpi_enabled", "mpi_threads_supported", "nccl_built", "rank", "remove_process_set", "rocm_built",
    "shutdown", "size", "start_timeline", "stop_timeline",
]  # fmt: skip


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
