"""The CUDA driver interface, implemented through CuPy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cupy
import numpy as np
from cupy.cuda import driver as _driver
from cupy.cuda import runtime as _cuda

from gradcomp.kernels.cuda import over_cuda
from gradcomp.kernels.cuda.driver import Block, Bytes
from gradcomp.kernels.cuda.over_cuda import CAPTURE_IMPLICIT, NOT_READY, ON_DEVICE, SUCCESS, CudaDriver


class _Pooled:
    """A block of CuPy's memory pool, which is freed when the object is destroyed."""

    def __init__(self, memory: Any) -> None:
        self._memory = memory
        self.address = int(memory.ptr)


class CupyPool:
    """A CuPy memory pool that only gradcomp uses; implements :class:`gradcomp.kernels.cuda.over_cuda.OwnPool`."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._pool = cupy.cuda.MemoryPool()

    def allocate(self, nbytes: int, stream: int) -> Block:
        """Allocates for the pool's own stream, whatever ``stream`` is. CuPy raises MemoryError if memory is short."""
        with self._stream:
            return _Pooled(self._pool.malloc(nbytes))

    def release(self) -> None:
        self._pool.free_all_blocks()

    def held_bytes(self) -> int:
        return int(self._pool.total_bytes())

    def describe(self) -> str:
        return f"gradcomp's own pool holds {self.held_bytes()}, {self._pool.used_bytes()} of them in use"


class CupyCuda:
    """Implements :class:`gradcomp.kernels.cuda.over_cuda.Cuda` through CuPy."""

    errors: tuple[type[BaseException], ...] = (_cuda.CUDARuntimeError, _driver.CUDADriverError)

    def current_device(self) -> int:
        return int(_cuda.getDevice())

    def set_device(self, index: int) -> None:
        _cuda.setDevice(index)

    def capability(self, index: int) -> int:
        return int(cupy.cuda.Device(index).compute_capability)

    def processors(self, index: int) -> int:
        return int(_cuda.deviceGetAttribute(_cuda.cudaDevAttrMultiProcessorCount, index))

    def version(self) -> int:
        return int(_cuda.driverGetVersion())

    def memory(self) -> tuple[int, int]:
        free, total = _cuda.memGetInfo()
        return free, total

    def owner(self, address: int) -> int | None:
        found = _cuda.pointerGetAttributes(address)
        return int(found.device) if found.type in ON_DEVICE else None

    def stream(self, priority: int) -> Any:
        """Returns a new stream, which is destroyed when the object is."""
        return cupy.cuda.Stream(non_blocking=True, priority=priority)

    def handle(self, stream: Any) -> int:
        return int(stream.ptr)

    def pool(self, stream: Any) -> CupyPool:
        return CupyPool(stream)

    def pinned(self, nbytes: int) -> Bytes:
        return np.frombuffer(cupy.cuda.alloc_pinned_memory(max(nbytes, 1)), np.uint8, nbytes)

    def copy(self, target: int, source: int, nbytes: int, kind: int, stream: Any) -> None:
        _cuda.memcpyAsync(target, source, nbytes, kind, stream.ptr)

    def zero(self, address: int, nbytes: int, stream: Any) -> None:
        _cuda.memsetAsync(address, 0, nbytes, stream.ptr)

    def module(self, path: Path) -> Any:
        return cupy.RawModule(path=str(path))

    def kernel(self, module: Any, name: str) -> Any:
        return module.get_function(name)

    def resident(self, kernel: Any, threads: int) -> int:
        return int(_driver.occupancyMaxActiveBlocksPerMultiprocessor(kernel.kernel.ptr, threads, 0))

    def launch(self, kernel: Any, blocks: int, threads: int, parameters: Bytes, stream: Any) -> None:
        """Launches a kernel with ``parameters`` as one struct; CuPy passes arrays of one element by value."""
        struct = parameters.view(np.dtype((np.void, len(parameters))))
        with stream:
            kernel((blocks,), (threads,), (struct,))

    def synchronize(self, stream: Any) -> None:
        stream.synchronize()

    def record(self, stream: int) -> Any:
        event = cupy.cuda.Event(disable_timing=True)
        _cuda.eventRecord(event.ptr, stream)
        return event

    def reached(self, event: Any) -> bool:
        status = _cuda.eventQuery(event.ptr)
        if status not in (SUCCESS, NOT_READY):
            raise _cuda.CUDARuntimeError(status)
        return bool(status == SUCCESS)

    def follow(self, stream: Any, event: Any) -> None:
        stream.wait_event(event)

    def is_captured(self, stream: int) -> bool:
        """Returns whether a stream is captured; True for the default stream where CUDA refuses to answer."""
        try:
            return bool(_cuda.streamIsCapturing(stream))
        except _cuda.CUDARuntimeError as error:
            if error.status == CAPTURE_IMPLICIT:
                return True
            raise


def driver(index: int) -> CudaDriver:
    """Returns the driver of a device, through CuPy."""
    return CudaDriver(CupyCuda(), index)


def index_of(address: int) -> int:
    """Returns the number of the device that holds an address, see :func:`gradcomp.kernels.cuda.over_cuda.index_of`."""
    return over_cuda.index_of(CupyCuda(), address)
