"""Looks at this process and its host: libraries, kernels, cores, limits, memory, and the disks that are written to."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np

from gradcomp.core.config import Config
from gradcomp.doctor.facts import Cores, Disk, Kernels, Limits
from gradcomp.job.cores import available_cores, kernel_threads
from gradcomp.kernels import dispatch

#: The libraries whose versions are compared, with the names under which packages of them are installed.
_LIBRARIES = {
    "torch": ("torch",),
    "ml_dtypes": ("ml_dtypes",),
    "safetensors": ("safetensors",),
    "tensorflow": ("tensorflow", "tensorflow-cpu"),
    "keras": ("keras",),
    "mpi4py": ("mpi4py",),
    "horovod": ("horovod",),
    "cupy": ("cupy-cuda13x", "cupy-cuda12x", "cupy"),
    "nccl": ("nvidia-nccl-cu13", "nvidia-nccl-cu12"),
}

#: The flags of a processor that each body of the compiled module needs; see native/dispatch.cpp.
_AVX2 = {"avx2", "f16c", "fma"}
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq"}

_CGROUPS = Path("/sys/fs/cgroup")
#: A limit of memory above this is none: the first version of cgroups says so by a number near 2^63.
_NO_LIMIT = 1 << 60
_PROBE_BYTES = 1 << 20


def libraries() -> dict[str, str]:
    """Return the versions of Python and of the libraries that are installed, without importing them."""
    found = {"Python": platform.python_version(), "NumPy": np.__version__}
    for library, packages in _LIBRARIES.items():
        for package in packages:
            with suppress(PackageNotFoundError):
                found[library] = version(package)
                break
    return found


def kernels(config: Config) -> Kernels:
    module, missing = dispatch.load()
    available = () if module is None else tuple(module.available_isas())
    missing = missing or ("" if available else "gradcomp was installed without its compiled module")
    return Kernels(config.kernels, config.isa, available, missing, _processor())


def _processor() -> str:
    """Return the widest instruction set of this processor that kernels can use; empty where it is not known."""
    flags: set[str] = set()
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("flags"):
                flags = set(line.partition(":")[2].split())
                break
    return next((isa for isa, needs in (("avx512", _AVX512), ("avx2", _AVX2)) if needs <= flags), "")


def cores(config: Config, local_ranks: int, training_threads: int | None) -> Cores:
    """Return cores and threads. ``training_threads``: None for those that OpenMP takes, its variable or all cores."""
    own = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    first = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    omp = int(first) if first.isdecimal() else 0
    training_threads = training_threads or omp or len(own)
    threads = kernel_threads(config.threads, available_cores(), local_ranks, training_threads)
    return Cores(tuple(own), os.cpu_count() or len(own), _quota(), training_threads, omp, threads)


def _quota() -> float:
    """Return the cores' worth of time that the container may use; 0 without a limit."""
    least = 0.0
    for directory in _cgroup("cpu"):
        quota = period = "max"
        with suppress(OSError, ValueError):
            quota, period = (directory / "cpu.max").read_text().split()
        with suppress(OSError):
            quota = (directory / "cpu.cfs_quota_us").read_text()
            period = (directory / "cpu.cfs_period_us").read_text()
        with suppress(ValueError, ZeroDivisionError):
            share = int(quota) / int(period)
            if share > 0:
                least = min(least or share, share)
    return round(least, 3)


def _cgroup(controller: str) -> Iterator[Path]:
    """Yield the directories of this process's control group, from its own up to the root, where they can be read."""
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            root = _CGROUPS / controllers if controllers else _CGROUPS
            directory = root / path.lstrip("/")
            for each in (directory, *directory.parents):
                if each.is_relative_to(root):
                    yield each


def limits() -> Limits:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    memory = {}
    with suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            name, _, value = line.partition(":")
            memory[name] = int(value.split()[0]) << 10
    total, available = memory.get("MemTotal", 0), memory.get("MemAvailable", 0)
    for directory in _cgroup("memory"):
        for limit, used in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            with suppress(OSError, ValueError):
                most = int((directory / limit).read_text())
                if most < _NO_LIMIT:
                    total = min(total, most)
                    available = min(available, max(most - int((directory / used).read_text()), 0))
    return Limits(-1 if soft == resource.RLIM_INFINITY else soft, total, available)


def disks(config: Config, rank: int) -> tuple[Disk, ...]:
    """Return the places that this rank writes to, after a file was written to each and removed."""
    files = []
    if config.run_log and rank == 0:
        files.append(("run log", Path(config.run_log)))
    if config.timeline and (rank == 0 or "{rank}" in config.timeline):
        files.append(("timeline", Path(config.timeline.replace("{rank}", str(rank)))))
    found = [_disk(purpose, path.parent, path) for purpose, path in files]
    try:
        found.append(_disk("temporary files", Path(tempfile.gettempdir())))
    except OSError as error:  # no directory can be written to
        found.append(Disk("temporary files", os.environ.get("TMPDIR", "/tmp"), 0, _reason(error)))  # noqa: S108
    return tuple(found)


def _disk(purpose: str, directory: Path, file: Path | None = None) -> Disk:
    problem, free = "", 0
    try:
        if file is not None and file.exists() and not os.access(file, os.W_OK):
            raise PermissionError(0, "Permission denied")
        free = shutil.disk_usage(directory).free
        with tempfile.TemporaryFile(dir=directory) as probe:
            probe.write(bytes(_PROBE_BYTES))
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as error:
        problem = _reason(error)
    return Disk(purpose, str(file or directory), free, problem)


def _reason(error: OSError) -> str:
    return error.strerror or type(error).__name__
