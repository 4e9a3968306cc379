"""Facts of ranks that have nothing to complain of, for tests to change."""

from __future__ import annotations

import dataclasses
from typing import Any

from gradcomp.doctor.facts import Cores, Disk, Facts, Gpus, Interface, Kernels, Limits, Network, Place

GIB = 1 << 30
TRANSPORTS = ("torch", "mpi", "shm", "shm+torch", "shm+mpi", "horovod", "nccl", "nccl+torch", "nccl+mpi")


def healthy(rank: int = 0, size: int = 2, per_host: int = 1, **changes: Any) -> Facts:
    """A rank of a job whose hosts have 8 cores; ``changes`` are fields of parts: ``cores={"quota": 2.0}``."""
    host = rank // per_host
    address = f"10.0.0.{host + 1}"
    facts = Facts(
        gradcomp="1.0",
        wire=5,
        libraries={"Python": "3.12.1", "NumPy": "2.3.0", "torch": "2.13.0"},
        place=Place("torchrun", rank, size, rank % per_host, per_host, str(host)),
        kernels=Kernels(available=("avx512", "avx2", "baseline"), processor="avx512"),
        cores=Cores(tuple(range(8)), 8, 0.0, 1, 1, 3),
        limits=Limits(1024, 64 * GIB, 32 * GIB),
        disks=(Disk("temporary files", "/tmp", 8 * GIB),),
        network=Network(
            f"node{host}", f"boot{host}",
            (Interface("lo", "127.0.0.1", 65536), Interface("eth0", address, 1500, 1000, True)),
            "eth0", "GLOO_SOCKET_IFNAME", address, address, {address: 40000}, "t" * 32,
        ),
        gpus=Gpus(problem="no CUDA driver (libcuda.so.1)"),
        lacks=dict.fromkeys(TRANSPORTS, ""),
    )  # fmt: skip
    return changed(facts, **changes)


def changed(facts: Facts, **changes: Any) -> Facts:
    """The facts with some fields of some parts replaced; a value that is no mapping replaces the part itself."""
    parts = {
        name: dataclasses.replace(getattr(facts, name), **change)
        if dataclasses.is_dataclass(getattr(facts, name))
        else {**getattr(facts, name), **change}
        if isinstance(change, dict)
        else change
        for name, change in changes.items()
    }
    return dataclasses.replace(facts, **parts)
