"""Which engines there are, and which of them this job uses; Horovod's names for these questions.

What is built is asked of this process and needs no ``init``. What is enabled is asked of the job: StateError before
``init``. All are local.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec

from gradcomp.job.runtime import current


def mpi_built() -> bool:
    """Whether mpi4py is installed, by which gradcomp speaks MPI."""
    return find_spec("mpi4py") is not None


def mpi_enabled() -> bool:
    """Whether gradients of this job travel by MPI."""
    state = current()
    return state.size > 1 and "mpi" in state.config.transport.split("+")


def mpi_threads_supported() -> bool:
    """Whether this process has initialised MPI with MPI_THREAD_MULTIPLE; False where it has not initialised MPI."""
    if "mpi4py.MPI" not in sys.modules:
        return False
    from mpi4py import MPI

    return bool(MPI.Is_initialized() and MPI.Query_thread() == MPI.THREAD_MULTIPLE)


def gloo_enabled() -> bool:
    """Whether this job's ranks met through torch.distributed, whose Gloo carries the users' collectives."""
    state = current()
    return state.size > 1 and state.network.engine == "torch"


def nccl_built() -> int:
    """The version of the NCCL that CuPy has, which the nccl transport needs, such as 22203; 0 if there is none."""
    try:
        from cupy.cuda import nccl
    except ImportError:
        return 0
    return int(nccl.get_version()) if getattr(nccl, "available", False) else 0


def cuda_built() -> bool:
    """Whether CuPy or cuda-bindings is installed, by which gradcomp's kernels run on CUDA devices."""
    if find_spec("cupy") is not None:
        return True
    try:
        return find_spec("cuda.bindings") is not None
    except ModuleNotFoundError:
        return False


def rocm_built() -> bool:
    """False: there are no kernels for ROCm."""
    return False


def ccl_built() -> bool:
    """False: oneCCL is no transport."""
    return False


def ddl_built() -> bool:
    """False: IBM's DDL is no transport."""
    return False


def is_homogeneous() -> bool:
    """Whether every host of the job has as many ranks. StateError before ``init``."""
    topology = current().topology
    return len({len(topology.members(leader)) for leader in topology.leaders}) == 1
