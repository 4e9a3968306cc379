"""Looks for GPUs, CuPy and NCCL, and for what each transport lacks on this rank."""

from __future__ import annotations

import ctypes
import os
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gradcomp.core.errors import is_there
from gradcomp.doctor.facts import Gpus
from gradcomp.job.launch import Launch
from gradcomp.job.runtime import nccl_built
from gradcomp.kernels import dispatch

_NAME_BYTES = 256
#: Launchers whose ranks MPI knows.
_MPI_LAUNCHERS = ("mpirun", "slurm")


def gpus(torch_cuda: str = "", torch_devices: int = 0) -> Gpus:
    """Return the GPUs of this process and what calls them; CuPy is imported if it is installed."""
    driver, names, problem = _driver()
    cupy, devices, cupy_problem = _cupy() if is_there("cupy") else ("", 0, "")
    return Gpus(
        driver=driver,
        names=names,
        problem=problem,
        cupy=cupy,
        cupy_devices=devices,
        cupy_problem=cupy_problem,
        nccl=nccl_built() if cupy else 0,
        has_bindings=is_there("cuda.bindings"),
        torch_cuda=torch_cuda,
        torch_devices=torch_devices,
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
    )


def _driver() -> tuple[str, tuple[str, ...], str]:
    """Return the version of CUDA that the driver serves, the names of its GPUs, and why there are none."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "", (), "no CUDA driver (libcuda.so.1)"
    if status := cuda.cuInit(0):
        return "", (), f"the CUDA driver cannot begin (error {status})"
    number, count = ctypes.c_int(), ctypes.c_int()
    cuda.cuDriverGetVersion(ctypes.byref(number))
    cuda.cuDeviceGetCount(ctypes.byref(count))
    names = []
    for index in range(count.value):
        name = ctypes.create_string_buffer(_NAME_BYTES)
        cuda.cuDeviceGetName(name, _NAME_BYTES, index)
        names.append(name.value.decode(errors="replace"))
    version = f"{number.value // 1000}.{number.value % 1000 // 10}"
    return version, tuple(names), "" if names else "the CUDA driver sees no device"


def _cupy() -> tuple[str, int, str]:
    """Return CuPy's version, the number of devices that it sees, and what is wrong with it."""
    version = "?"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about NCCL, which is reported otherwise
            import cupy

            version = str(cupy.__version__)
            return version, int(cupy.cuda.runtime.getDeviceCount()), ""
    except Exception as error:  # noqa: BLE001 - CuPy raises errors of its own and of the loader
        return version, 0, " ".join(f"{error}".split())[:200] or type(error).__name__


def lacks(launch: Launch, found: Gpus) -> dict[str, str]:
    """Return for each transport what it lacks on this rank; empty text if nothing."""
    between = {
        "torch": "" if is_there("torch") else "PyTorch: pip install 'gradcomp[torch]'",
        "mpi": _mpi(launch),
    }
    shared, nccl = _shared_memory(), _nccl(found)
    several = f"all {launch.size} ranks on one host" if launch.size > 1 and not launch.one_host else ""
    return {
        **between,
        "shm": shared or several,
        "shm+torch": shared or between["torch"],
        "shm+mpi": shared or between["mpi"],
        "horovod": _horovod(launch),
        "nccl": nccl,
        "nccl+torch": nccl or shared or between["torch"],
        "nccl+mpi": nccl or shared or between["mpi"],
    }


def _mpi(launch: Launch) -> str:
    if not is_there("mpi4py"):
        return "mpi4py: pip install 'gradcomp[mpi]'"
    from gradcomp.transport.mpi_process import load

    try:
        load()
    except (ImportError, RuntimeError) as error:
        return "an MPI library that mpi4py can use (" + " ".join(str(error).split())[:160] + ")"
    return "" if launch.launcher in _MPI_LAUNCHERS else "ranks that mpiexec, mpirun or srun started"


def _shared_memory() -> str:
    module: Any = dispatch.load()[0]
    return "" if hasattr(module, "ShmRank") else "the compiled module of gradcomp"


def _horovod(launch: Launch) -> str:
    spec = find_spec("horovod") if is_there("horovod") else None
    if spec is None:
        return "Horovod, built for this PyTorch"
    places = [Path(place) / "torch" for place in spec.submodule_search_locations or ()]
    if not any(list(place.glob("mpi_lib*.so")) for place in places):
        return "Horovod's extension for PyTorch, which is built when Horovod is installed"
    return "" if launch.launcher in ("horovodrun", *_MPI_LAUNCHERS) else "ranks that horovodrun started"


def _nccl(found: Gpus) -> str:
    if not found.cupy:
        return "CuPy: pip install 'gradcomp[nccl13]', or 'gradcomp[nccl12]' where CUDA is 12.x"
    if not found.cupy_devices:
        return "a GPU that CuPy sees"
    return (
        "" if found.nccl else "NCCL: pip install 'gradcomp[nccl13]', or 'gradcomp[nccl12]' where CUDA is 12.x"
    )
