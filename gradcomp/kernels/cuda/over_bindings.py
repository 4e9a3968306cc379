"""CUDA by NVIDIA's own bindings (``cuda-bindings``), which PyTorch's builds for CUDA bring: for who has no CuPy."""

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

_OUT_OF_MEMORY = 2  # of cudaError
_NON_BLOCKING = 1  # of cudaStreamCreateWithPriority
_WITHOUT_TIME = 2  # of cudaEventCreateWithFlags
_LEAST_PINNED_BYTES = 512

_KINDS = {
    TO_DEVICE: _cuda.cudaMemcpyKind.cudaMemcpyHostToDevice,
    TO_HOST: _cuda.cudaMemcpyKind.cudaMemcpyDeviceToHost,
}
_Attribute = _cuda.cudaDeviceAttr


class CudaError(RuntimeError):
    """What CUDA refused, with its text. ``status``: CUDA's number."""

    def __init__(self, status: Any, text: str) -> None:
        super().__init__(text)
        self.status = int(status)


def _failure(status: Any) -> CudaError:
    """Of the runtime's statuses, or of the driver's."""
    _forget()
    name = getattr(status, "name", f"status {int(status)}")
    if isinstance(status, _driver.CUresult):
        told = _driver.cuGetErrorString(status)
    else:
        told = _cuda.cudaGetErrorString(status)
    text = told[1] if len(told) > 1 and told[1] else b""
    return CudaError(status, f"{name}: {text.decode(errors='replace')}" if text else name)


def _forget() -> None:
    """CUDA keeps the last status that is no success, and PyTorch would take it for that of its own next kernel."""
    _cuda.cudaGetLastError()


def _call(function: Any, *arguments: Any) -> Any:
    """What a function gives beside its status: nothing, or one value, or a tuple of several."""
    status, *found = function(*arguments)
    if status != SUCCESS:
        raise _failure(status)
    return found[0] if len(found) == 1 else tuple(found)


class _Allocated:
    """Goes back, in the order of the stream, with the last reference."""

    def __init__(self, address: int, stream: int) -> None:
        self.address = address
        # At exit the device's memory is freed with the process.
        weakref.finalize(self, _cuda.cudaFreeAsync, address, stream).atexit = False


class AsyncPool:
    """The device's own, which CUDA keeps. See :class:`gradcomp.kernels.cuda.over_cuda.OwnPool`."""

    def __init__(self, index: int) -> None:
        self._pool = _call(_cuda.cudaDeviceGetDefaultMemPool, index)

    def allocate(self, nbytes: int, stream: int) -> _Allocated:
        """By cudaMallocAsync."""
        status, address = _cuda.cudaMallocAsync(max(nbytes, 1), stream)
        if status == _OUT_OF_MEMORY:
            _forget()
            raise MemoryError(f"no {nbytes} bytes")
        if status != SUCCESS:
            raise _failure(status)
        return _Allocated(int(address), stream)

    def release(self) -> None:
        """All that is not in use."""
        _call(_cuda.cudaMemPoolTrimTo, self._pool, 0)

    def held_bytes(self) -> int:
        """By CUDA's counter."""
        return self._counted(_cuda.cudaMemPoolAttr.cudaMemPoolAttrReservedMemCurrent)

    def describe(self) -> str:
        """By CUDA's own counters."""
        used = self._counted(_cuda.cudaMemPoolAttr.cudaMemPoolAttrUsedMemCurrent)
        return f"the device's pool holds {self.held_bytes()}, {used} of them in use"

    def _counted(self, attribute: Any) -> int:
        return int(_call(_cuda.cudaMemPoolGetAttribute, self._pool, attribute))


class _Pinned:
    """Pinned memory by powers of two, kept when it is no longer used: CUDA stops the device to free it."""

    def __init__(self) -> None:
        self._free: defaultdict[int, list[int]] = defaultdict(list)

    def take(self, nbytes: int) -> Bytes:
        """It goes back when no array looks at it any more."""
        size = 1 << (max(nbytes, _LEAST_PINNED_BYTES) - 1).bit_length()
        free = self._free[size]
        try:
            address = free.pop()  # threads may come at once, so nothing is asked before
        except IndexError:
            address = int(_call(_cuda.cudaMallocHost, size))
        memory = (ctypes.c_ubyte * size).from_address(address)
        weakref.finalize(memory, free.append, address).atexit = False
        whole: Any = memory  # of ctypes, which NumPy's annotations do not know as a buffer
        return np.frombuffer(whole, np.dtype(np.uint8), nbytes)


class _Event:
    """Destroyed with the object."""

    def __init__(self) -> None:
        self.event = _call(_cuda.cudaEventCreateWithFlags, _WITHOUT_TIME)
        weakref.finalize(self, _cuda.cudaEventDestroy, self.event).atexit = False


class BindingsCuda:
    """See :class:`gradcomp.kernels.cuda.over_cuda.Cuda`. A stream is its handle."""

    errors: tuple[type[BaseException], ...] = (CudaError,)

    def __init__(self) -> None:
        self._pinned = _Pinned()

    def current_device(self) -> int:
        """An int."""
        return int(_call(_cuda.cudaGetDevice))

    def set_device(self, index: int) -> None:
        """For this thread."""
        _call(_cuda.cudaSetDevice, index)

    def capability(self, index: int) -> int:
        """By two attributes."""
        major = self._attribute(_Attribute.cudaDevAttrComputeCapabilityMajor, index)
        return 10 * major + self._attribute(_Attribute.cudaDevAttrComputeCapabilityMinor, index)

    def processors(self, index: int) -> int:
        """By an attribute."""
        return self._attribute(_Attribute.cudaDevAttrMultiProcessorCount, index)

    def _attribute(self, attribute: Any, index: int) -> int:
        return int(_call(_cuda.cudaDeviceGetAttribute, attribute, index))

    def version(self) -> int:
        """An int."""
        return int(_call(_cuda.cudaDriverGetVersion))

    def memory(self) -> tuple[int, int]:
        """Two ints."""
        free, total = _call(_cuda.cudaMemGetInfo)
        return int(free), int(total)

    def owner(self, address: int) -> int | None:
        """By the attributes of a pointer."""
        found = _call(_cuda.cudaPointerGetAttributes, address)
        return int(found.device) if int(found.type) in ON_DEVICE else None

    def stream(self, priority: int) -> int:
        """It lives as long as the process, as a device does."""
        return int(_call(_cuda.cudaStreamCreateWithPriority, _NON_BLOCKING, priority))

    def handle(self, stream: int) -> int:
        """The same."""
        return stream

    def pool(self, stream: int) -> AsyncPool:
        """That of the current device."""
        return AsyncPool(self.current_device())

    def pinned(self, nbytes: int) -> Bytes:
        """From memory that is kept."""
        return self._pinned.take(nbytes)

    def copy(self, target: int, source: int, nbytes: int, kind: int, stream: int) -> None:
        """Does not wait."""
        _call(_cuda.cudaMemcpyAsync, target, source, nbytes, _KINDS[kind], stream)

    def zero(self, address: int, nbytes: int, stream: int) -> None:
        """Does not wait."""
        _call(_cuda.cudaMemsetAsync, address, 0, nbytes, stream)

    def module(self, path: Path) -> Any:
        """Of a cubin, or of PTX, which ends with a zero."""
        return _call(_driver.cuModuleLoadData, path.read_bytes() + b"\0")

    def kernel(self, module: Any, name: str) -> Any:
        """A function's handle."""
        return _call(_driver.cuModuleGetFunction, module, name.encode())

    def resident(self, kernel: Any, threads: int) -> int:
        """Without dynamic shared memory."""
        return int(_call(_driver.cuOccupancyMaxActiveBlocksPerMultiprocessor, kernel, threads, 0))

    def launch(self, kernel: Any, blocks: int, threads: int, parameters: Bytes, stream: int) -> None:
        """CUDA copies the argument, of which it is given the address, before it returns."""
        arguments = np.array([parameters.ctypes.data], np.uint64)
        _call(
            *(_driver.cuLaunchKernel, kernel, blocks, 1, 1, threads, 1, 1, 0, stream),
            *(int(arguments.ctypes.data), 0),
        )

    def synchronize(self, stream: int) -> None:
        """Without the interpreter's lock."""
        _call(_cuda.cudaStreamSynchronize, stream)

    def record(self, stream: int) -> _Event:
        """An event without a time."""
        event = _Event()
        _call(_cuda.cudaEventRecord, event.event, stream)
        return event

    def reached(self, event: _Event) -> bool:
        """By the status."""
        (status,) = _cuda.cudaEventQuery(event.event)
        if status not in (SUCCESS, NOT_READY):
            raise _failure(status)
        if status == NOT_READY:
            _forget()
        return bool(status == SUCCESS)

    def follow(self, stream: int, event: _Event) -> None:
        """The program does not wait."""
        _call(_cuda.cudaStreamWaitEvent, stream, event.event, 0)

    def is_captured(self, stream: int) -> bool:
        """What CUDA refuses to tell is yes."""
        status, *found = _cuda.cudaStreamIsCapturing(stream)
        if status == CAPTURE_IMPLICIT:
            _forget()
            return True
        if status != SUCCESS:
            raise _failure(status)
        return int(found[0]) != 0


def driver(index: int) -> CudaDriver:
    """For one device."""
    return CudaDriver(BindingsCuda(), index)


def index_of(address: int) -> int:
    """See :func:`gradcomp.kernels.cuda.over_cuda.index_of`."""
    return over_cuda.index_of(BindingsCuda(), address)
