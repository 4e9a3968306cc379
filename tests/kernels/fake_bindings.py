"""NVIDIA's bindings over the CPU's stand-in: the driver's code and the kernels run without a GPU."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
from cuda_on_cpu.driver import CpuDriver
from kernels.standin import FOLDER

from gradcomp.kernels.cuda.modules import Module

_DEVICE, _PAGEABLE = 2, 0  # of cudaMemoryType


class Status(IntEnum):
    """Of the runtime."""

    cudaSuccess = 0
    cudaErrorMemoryAllocation = 2
    cudaErrorNotReady = 600
    cudaErrorIllegalAddress = 700
    cudaErrorStreamCaptureImplicit = 906


class CUresult(IntEnum):
    """Of the driver."""

    CUDA_SUCCESS = 0
    CUDA_ERROR_NOT_FOUND = 500
    CUDA_ERROR_ILLEGAL_ADDRESS = 700


OK, FINE = Status.cudaSuccess, CUresult.CUDA_SUCCESS


class Fake:
    """The two modules, and what happened. ``status``: what copies and waits end with."""

    def __init__(self) -> None:
        self.cpu = CpuDriver(FOLDER)
        self._thread = threading.local()
        self.devices_used: set[int] = set()
        self.capturing: set[int] = set()
        self.event_status: int = 0
        self.launch_status: int = 0
        self.status: int = 0
        self.free = 1 << 40  # bytes that the pool can still take
        self.streams: list[dict[str, Any]] = []
        self.events = 0
        self.destroyed = 0
        self.freed = 0  # how often the pool gave back what it kept
        self.forgotten = 0
        self.pinned: dict[int, np.ndarray] = {}
        self.asked: list[tuple[Any, int, int]] = []  # what kernels take of a processor
        self.blocks = 3  # of a kernel that it holds
        self._blocks: dict[int, Any] = {}
        self._code: dict[bytes, Module] = {}
        self._loaded: list[Module] = []
        self._kernels: list[Any] = []
        self.runtime: Any = ModuleType("cuda.bindings.runtime")
        self.driver: Any = ModuleType("cuda.bindings.driver")
        for module, prefix in ((self.runtime, "cuda"), (self.driver, "cu")):
            for name in dir(self):
                if name.startswith(prefix) and name.removeprefix(prefix)[:1].isupper():
                    setattr(module, name, getattr(self, name))
        self.runtime.cudaMemcpyKind = SimpleNamespace(cudaMemcpyHostToDevice=1, cudaMemcpyDeviceToHost=2)
        self.runtime.cudaDeviceAttr = SimpleNamespace(
            cudaDevAttrComputeCapabilityMajor=75,
            cudaDevAttrComputeCapabilityMinor=76,
            cudaDevAttrMultiProcessorCount=16,
        )
        self.runtime.cudaMemPoolAttr = SimpleNamespace(
            cudaMemPoolAttrReservedMemCurrent=5, cudaMemPoolAttrUsedMemCurrent=7
        )
        self.driver.CUresult = CUresult

    # --- the runtime ---------------------------------------------------------------------------------------

    def get_device(self) -> int:
        return getattr(self._thread, "device", 0)

    def cudaGetDevice(self) -> Any:
        return OK, self.get_device()

    def cudaSetDevice(self, index: int) -> Any:
        self._thread.device = index
        self.devices_used.add(index)
        return (OK,)

    def cudaDeviceGetAttribute(self, attribute: int, index: int) -> Any:
        return OK, {75: 9, 76: 0, 16: 132}[attribute]

    def cudaDriverGetVersion(self) -> Any:
        return OK, 13000

    def cudaMemGetInfo(self) -> Any:
        return OK, 123, 456

    def cudaGetLastError(self) -> Any:
        self.forgotten += 1
        return (OK,)

    def cudaGetErrorString(self, status: Status) -> Any:
        return OK, {700: b"an illegal memory access was encountered"}.get(int(status), b"no text")

    def cudaPointerGetAttributes(self, address: int) -> Any:
        found = self.cpu.reaches(address)
        return OK, SimpleNamespace(type=_DEVICE if found else _PAGEABLE, device=1 if found else -2)

    def cudaStreamCreateWithPriority(self, flags: int, priority: int) -> Any:
        self.streams.append({"non_blocking": flags == 1, "priority": priority})
        return OK, CpuDriver.stream

    def cudaStreamSynchronize(self, stream: int) -> Any:
        self.cpu.synchronize()
        return (Status(self.status),)

    def cudaStreamWaitEvent(self, stream: int, event: int, flags: int) -> Any:
        return (OK,)

    def cudaStreamIsCapturing(self, stream: int) -> Any:
        if self.capturing and stream == 0:
            return Status.cudaErrorStreamCaptureImplicit, None
        return OK, int(stream in self.capturing)

    def cudaDeviceGetDefaultMemPool(self, device: int) -> Any:
        return OK, ("pool", device)

    def cudaMallocAsync(self, size: int, stream: int) -> Any:
        if size > self.free:
            return Status.cudaErrorMemoryAllocation, None
        block = self.cpu.allocate(size)
        self._blocks[block.address] = block
        return OK, block.address

    def cudaFreeAsync(self, address: int, stream: int) -> Any:
        del self._blocks[address]
        return (OK,)

    def cudaMemPoolTrimTo(self, pool: Any, least: int) -> Any:
        self.freed += 1
        return (OK,)

    def cudaMemPoolGetAttribute(self, pool: Any, attribute: int) -> Any:
        return OK, 4096 if pool == ("pool", 1) else 0

    def cudaMallocHost(self, size: int) -> Any:
        memory = self.cpu.pinned(size)
        self.pinned[memory.ctypes.data] = memory
        return OK, memory.ctypes.data

    def cudaMemcpyAsync(self, target: int, source: int, count: int, kind: int, stream: int) -> Any:
        if not self.status:
            ctypes.memmove(target, source, count)
        return (Status(self.status),)

    def cudaMemsetAsync(self, address: int, value: int, count: int, stream: int) -> Any:
        if not self.status:
            ctypes.memset(address, value, count)
        return (Status(self.status),)

    def cudaEventCreateWithFlags(self, flags: int) -> Any:
        self.events += 1
        return OK, self.events

    def cudaEventRecord(self, event: int, stream: int) -> Any:
        return (OK,)

    def cudaEventQuery(self, event: int) -> Any:
        return (Status(self.event_status),)

    def cudaEventDestroy(self, event: int) -> Any:
        self.destroyed += 1
        return (OK,)

    # --- the driver ----------------------------------------------------------------------------------------

    def built(self, module: Module, capability: int, cuda: int) -> Path:
        """In place of the compiler: a file that names a module."""
        assert (capability, cuda) == (90, 13000)
        target = FOLDER / f"{module.digest('sm_90', (13, 0))}.pretended"
        FOLDER.mkdir(parents=True, exist_ok=True)
        target.write_bytes(target.name.encode())
        self._code[target.read_bytes()] = module
        return target

    def cuGetErrorString(self, status: CUresult) -> Any:
        return FINE, b"what the driver says"

    def cuModuleLoadData(self, image: bytes) -> Any:
        assert image.endswith(b"\0")
        self._loaded.append(self._code[image[:-1]])
        return FINE, len(self._loaded) - 1

    def cuModuleGetFunction(self, module: int, name: bytes) -> Any:
        found = self._loaded[module]
        if name.decode() not in found.kernels:
            return CUresult.CUDA_ERROR_NOT_FOUND, None
        self._kernels.append(self.cpu.function(found.source, name.decode(), dict(found.defines)))
        return FINE, len(self._kernels) - 1

    def cuOccupancyMaxActiveBlocksPerMultiprocessor(self, kernel: Any, threads: int, dynamic: int) -> Any:
        self.asked.append((kernel, threads, dynamic))
        return FINE, self.blocks

    def cuLaunchKernel(self, kernel: int, *given: Any) -> Any:
        blocks, *ones, stream, arguments, extra = given
        threads = ones.pop(2)
        assert (ones, stream, extra) == ([1, 1, 1, 1, 0], CpuDriver.stream, 0)
        if self.launch_status:
            return (CUresult(self.launch_status),)
        struct = ctypes.c_uint64.from_address(arguments).value
        parameters: Any = SimpleNamespace(ctypes=SimpleNamespace(data=struct))
        self.cpu.launch(self._kernels[kernel], blocks, threads, parameters)
        return (FINE,)


@contextmanager
def installed() -> Iterator[tuple[Fake, Any]]:
    """The fake, and what makes the driver over it."""
    fake = Fake()
    cuda: Any = ModuleType("cuda")
    bindings: Any = ModuleType("cuda.bindings")
    bindings.runtime, bindings.driver = fake.runtime, fake.driver
    cuda.bindings = bindings
    theirs = {
        "cuda": cuda,
        "cuda.bindings": bindings,
        "cuda.bindings.runtime": fake.runtime,
        "cuda.bindings.driver": fake.driver,
    }
    ours = "gradcomp.kernels.cuda.over_bindings"
    from gradcomp.kernels.cuda import over_cuda

    before = {name: sys.modules.pop(name, None) for name in (ours, *theirs)}
    sys.modules.update(theirs)
    compiler = over_cuda.built
    over_cuda.built = fake.built
    try:
        from gradcomp.kernels.cuda.over_bindings import driver

        yield fake, driver
    finally:
        over_cuda.built = compiler
        for name, module in before.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module
