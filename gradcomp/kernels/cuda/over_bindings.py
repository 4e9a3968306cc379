"""CUDA through NVIDIA's bindings (``cuda-bindings``), which PyTorch's builds for CUDA install; used without CuPy."""

from __future__ import annotations

import ctypes
import weakref
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from cuda.bindings import driver as _driver
from cuda.bindings import runtime as _cuda

from gradcomp.kernels.cuda import over_cuda
from gradcomp.kernels.cuda.driver import Bytes
from gradcomp.kernels.cuda.over_cuda import (
    CAPTURE_IMPLICIT,
    NOT_READY,
    ON_DEVICE,
    SUCCESS,
    TO_DEVICE,
    TO_HOST,
    CudaDriver,
)

_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation
_NON_BLOCKING = 1  # cudaStreamNonBlocking
_WITHOUT_TIME = 2  # cudaEventDisableTiming
_LEAST_PINNED_BYTES = 512

_KINDS = {
    TO_DEVICE: _cuda.cudaMemcpyKind.cudaMemcpyHostToDevice,
    TO_HOST: _cuda.cudaMemcpyKind.cudaMemcpyDeviceToHost,
}
_Attribute = _cuda.cudaDeviceAttr


class CudaError(RuntimeError):
    """An error that a CUDA call returned, with CUDA's text. ``status``: CUDA's number."""

    def __init__(self, status: Any, text: str) -> None:
        super().__init__(text)
        self.status = int(status)


def _failure(status: Any) -> CudaError:
    """Returns the error of a status of the runtime or the driver."""
    _forget()
    name = getattr(status, "name", f"status {int(status)}")
    if isinstance(status, _driver.CUresult):
        told = _driver.cuGetErrorString(status)
    else:
        told = _cuda.cudaGetErrorString(status)
    text = told[1] if len(told) > 1 and told[1] else b""
    return CudaError(status, f"{name}: {text.decode(errors='replace')}" if text else name)


def _forget() -> None:
    """Clears the runtime's last error, which PyTorch would attribute to its own next kernel."""
    _cuda.cudaGetLastError()


def _call(function: Any, *arguments: Any) -> Any:
    """Calls a function, raises unless its status is success, and returns its other results: none, one, or a tuple."""
    status, *found = function(*arguments)
    if status != SUCCESS:
        raise _failure(status)
    return found[0] if len(found) == 1 else tuple(found)


class _Allocated:
    """Memory that is freed, in the order of the stream, with the last reference to this object."""

    def __init__(self, address: int, stream: int) -> None:
        self.address = address
        # Not called at exit: the process's end frees the device's memory.
        weakref.finalize(self, _cuda.cudaFreeAsync, address, stream).atexit = False


class AsyncPool:
    """The device's default memory pool, as an :class:`gradcomp.kernels.cuda.over_cuda.OwnPool`."""

    def __init__(self, index: int) -> None:
        self._pool = _call(_cuda.cudaDeviceGetDefaultMemPool, index)

    def allocate(self, nbytes: int, stream: int) -> _Allocated:
        status, address = _cuda.cudaMallocAsync(max(nbytes, 1), stream)
        if status == _OUT_OF_MEMORY:
            _forget()
            raise MemoryError(f"no {nbytes} bytes")
        if status != SUCCESS:
            raise _failure(status)
        return _Allocated(int(address), stream)

    def release(self) -> None:
        _call(_cuda.cudaMemPoolTrimTo, self._pool, 0)

    def held_bytes(self) -> int:
        return self._counted(_cuda.cudaMemPoolAttr.cudaMemPoolAttrReservedMemCurrent)

    def describe(self) -> str:
        used = self._counted(_cuda.cudaMemPoolAttr.cudaMemPoolAttrUsedMemCurrent)
        return f"the device's pool holds {self.held_bytes()}, {used} of them in use"

    def _counted(self, attribute: Any) -> int:
        return int(_call(_cuda.cudaMemPoolGetAttribute, self._pool, attribute))


class _Pinned:
    """Pinned memory by powers of two, kept for reuse: CUDA stops the device to free it."""

    def __init__(self) -> None:
        self._free: defaultdict[int, list[int]] = defaultdict(list)

    def take(self, nbytes: int) -> Bytes:
        """Returns memory that comes back to the pool when no array refers to it any more."""
        size = 1 << (max(nbytes, _LEAST_PINNED_BYTES) - 1).bit_length()
        free = self._free[size]
        try:
            address = free.pop()  # without a look at the length first, as threads may call this concurrently
        except IndexError:
            address = int(_call(_cuda.cudaMallocHost, size))
        memory = (ctypes.c_ubyte * size).from_address(address)
        weakref.finalize(memory, free.append, address).atexit = False
        whole: Any = memory  # NumPy's annotations do not accept a ctypes array as a buffer
        return np.frombuffer(whole, np.dtype(np.uint8), nbytes)


class _Event:
    """An event without time stamps, destroyed with the object."""

    def __init__(self) -> None:
        self.event = _call(_cuda.cudaEventCreateWithFlags, _WITHOUT_TIME)
        weakref.finalize(self, _cuda.cudaEventDestroy, self.event).atexit = False


class BindingsCuda:
    """Implements :class:`gradcomp.kernels.cuda.over_cuda.Cuda`. A stream is represented by its handle."""

    errors: tuple[type[BaseException], ...] = (CudaError,)

    def __init__(self) -> None:
        self._pinned = _Pinned()

    def current_device(self) -> int:
        return int(_call(_cuda.cudaGetDevice))

    def set_device(self, index: int) -> None:
        _call(_cuda.cudaSetDevice, index)

    def capability(self, index: int) -> int:
        major = self._attribute(_Attribute.cudaDevAttrComputeCapabilityMajor, index)
        return 10 * major + self._attribute(_Attribute.cudaDevAttrComputeCapabilityMinor, index)

    def processors(self, index: int) -> int:
        return self._attribute(_Attribute.cudaDevAttrMultiProcessorCount, index)

    def _attribute(self, attribute: Any, index: int) -> int:
        return int(_call(_cuda.cudaDeviceGetAttribute, attribute, index))

    def version(self) -> int:
        return int(_call(_cuda.cudaDriverGetVersion))

    def memory(self) -> tuple[int, int]:
        free, total = _call(_cuda.cudaMemGetInfo)
        return int(free), int(total)

    def owner(self, address: int) -> int | None:
        found = _call(_cuda.cudaPointerGetAttributes, address)
        return int(found.device) if int(found.type) in ON_DEVICE else None

    def stream(self, priority: int) -> int:
        """Returns a stream that lives as long as the process."""
        return int(_call(_cuda.cudaStreamCreateWithPriority, _NON_BLOCKING, priority))

    def handle(self, stream: int) -> int:
        return stream

    def pool(self, stream: int) -> AsyncPool:
        """Returns the pool of the current device."""
        return AsyncPool(self.current_device())

    def pinned(self, nbytes: int) -> Bytes:
        return self._pinned.take(nbytes)

    def copy(self, target: int, source: int, nbytes: int, kind: int, stream: int) -> None:
        _call(_cuda.cudaMemcpyAsync, target, source, nbytes, _KINDS[kind], stream)

    def zero(self, address: int, nbytes: int, stream: int) -> None:
        _call(_cuda.cudaMemsetAsync, address, 0, nbytes, stream)

    def module(self, path: Path) -> Any:
        """Loads a cubin, or PTX, which CUDA expects to end with a zero byte."""
        return _call(_driver.cuModuleLoadData, path.read_bytes() + b"\0")

    def kernel(self, module: Any, name: str) -> Any:
        return _call(_driver.cuModuleGetFunction, module, name.encode())

    def resident(self, kernel: Any, threads: int) -> int:
        return int(_call(_driver.cuOccupancyMaxActiveBlocksPerMultiprocessor, kernel, threads, 0))

    def launch(self, kernel: Any, blocks: int, threads: int, parameters: Bytes, stream: int) -> None:
        """Launches a kernel; CUDA copies the argument, whose address it is given, before it returns."""
        arguments = np.array([parameters.ctypes.data], np.uint64)
        _call(
            *(_driver.cuLaunchKernel, kernel, blocks, 1, 1, threads, 1, 1, 0, stream),
            *(int(arguments.ctypes.data), 0),
        )

    def synchronize(self, stream: int) -> None:
        _call(_cuda.cudaStreamSynchronize, stream)

    def record(self, stream: int) -> _Event:
        event = _Event()
        _call(_cuda.cudaEventRecord, event.event, stream)
        return event

    def reached(self, event: _Event) -> bool:
        (status,) = _cuda.cudaEventQuery(event.event)
        if status not in (SUCCESS, NOT_READY):
            raise _failure(status)
        if status == NOT_READY:
            _forget()
        return bool(status == SUCCESS)

    def follow(self, stream: int, event: _Event) -> None:
        _call(_cuda.cudaStreamWaitEvent, stream, event.event, 0)

    def is_captured(self, stream: int) -> bool:
        """Returns whether a stream is captured; True for the default stream where CUDA refuses to answer."""
        status, *found = _cuda.cudaStreamIsCapturing(stream)
        if status == CAPTURE_IMPLICIT:
            _forget()
            return True
        if status != SUCCESS:
            raise _failure(status)
        return int(found[0]) != 0


def driver(index: int) -> CudaDriver:
    """Returns the driver of a device, over NVIDIA's bindings."""
    return CudaDriver(BindingsCuda(), index)


def index_of(address: int) -> int:
    """Returns the number of the device that holds an address, see :func:`gradcomp.kernels.cuda.over_cuda.index_of`."""
    return over_cuda.index_of(BindingsCuda(), address)
