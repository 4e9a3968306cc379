"""Answers Horovod's questions about engines: which are built, and which this job uses. All answers are local.

The functions ``..._built`` ask about this process and need no ``init``. The functions ``..._enabled`` ask about the job
and raise StateError before ``init``.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec

from gradcomp.job.runtime import current


def mpi_built() -> bool:
    """Return whether mpi4py is installed, through which gradcomp uses MPI."""
    return find_spec("mpi4py") is not None


def mpi_enabled() -> bool:
    """Return whether this job sends its gradients over MPI.

    Raises:
        StateError: before ``init``.
    """
    state = current()
    return state.size > 1 and "mpi" in state.config.transport.split("+")


def mpi_threads_supported() -> bool:
    """Return whether MPI was initialised in this process, and with MPI_THREAD_MULTIPLE."""
    if "mpi4py.MPI" not in sys.modules:
        return False
    from mpi4py import MPI

    return bool(MPI.Is_initialized() and MPI.Query_thread() == MPI.THREAD_MULTIPLE)


def gloo_enabled() -> bool:
    """Return whether this job's ranks met through torch.distributed, whose Gloo then carries the user's collectives.

    Raises:
        StateError: before ``init``.
    """
    state = current()
    return state.size > 1 and state.network.engine == "torch"


def nccl_built() -> int:
    """Return the version of CuPy's NCCL, such as 22203, which the nccl transport needs; 0 if there is none."""
    try:
        from cupy.cuda import nccl
    except ImportError:
        return 0
    return int(nccl.get_version()) if getattr(nccl, "available", False) else 0


def cuda_built() -> bool:
    """Return whether CuPy or cuda-bindings is installed, with which gradcomp's kernels run on CUDA devices."""
    if find_spec("cupy") is not None:
        return True
    try:
        return find_spec("cuda.bindings") is not None
    except ModuleNotFoundError:
        return False


def rocm_built() -> bool:
    """Return False, because there are no kernels for ROCm."""
    return False


def ccl_built() -> bool:
    """Return False, because oneCCL is not among the transports."""
    return False


def ddl_built() -> bool:
    """Return False, because IBM's DDL is not among the transports."""
    return False


def is_homogeneous() -> bool:
    """Return whether every host of the job has the same number of ranks.

    Raises:
        StateError: before ``init``.
    """
    topology = current().topology
    return len({len(topology.members(leader)) for leader in topology.leaders}) == 1
