"""The driver over CuPy: one device, one stream, modules compiled by NVRTC when they are first needed."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import cupy
import numpy as np
from cupy.cuda import runtime as _cuda

from gradcomp.core.errors import ConfigError
from gradcomp.kernels.cuda.built import built
from gradcomp.kernels.cuda.driver import Block, Bytes
from gradcomp.kernels.cuda.modules import Module, holding

_TO_DEVICE, _TO_HOST = 1, 2  # of cudaMemcpyKind
_DEVICE, _MANAGED = 2, 3  # of cudaMemoryType


def index_of(address: int) -> int:
    """The number, in this process, of the device in whose memory an address is; ConfigError if none is."""
    try:
        found = _cuda.pointerGetAttributes(address)
    except _cuda.CUDARuntimeError as error:
        raise ConfigError(f"CUDA cannot be asked whose memory it is: {error}") from error
    if found.type not in (_DEVICE, _MANAGED):
        raise ConfigError("what lies on a GPU is not in the memory of a CUDA device")
    return int(found.device)


class _Pooled:
    """Memory of CuPy's pool."""

    def __init__(self, memory: Any) -> None:
        self._memory = memory
        self.address = int(memory.ptr)


class CupyDriver:
    """See :class:`gradcomp.kernels.cuda.driver.Driver`. ConfigError without a device, or one that shares no memory."""

    def __init__(self, index: int) -> None:
        try:
            self._device = cupy.cuda.Device(index)
            shared = _cuda.deviceGetAttribute(_cuda.cudaDevAttrConcurrentManagedAccess, index)
            self._capability = int(self._device.compute_capability)
            with self._device:
                self._stream = cupy.cuda.Stream(non_blocking=True)
                self._pool = cupy.cuda.MemoryPool()
        except _cuda.CUDARuntimeError as error:
            raise ConfigError(f"there is no usable cuda:{index}: {error}") from error
        if not shared:
            raise ConfigError(f"the host cannot reach managed memory of cuda:{index} while its kernels run")
        self._index = index
        self._functions: dict[tuple[object, ...], Any] = {}
        self._modules: dict[Module, Any] = {}

    @property
    def device(self) -> Any:
        """CuPy's, to be made the current one."""
        return self._device

    @property
    def stream(self) -> int:
        """The handle of the stream on which all of it runs."""
        return int(self._stream.ptr)

    @property
    def pooled_bytes(self) -> int:
        """Memory that the pool has taken from the device: its peak, as it gives nothing back."""
        return int(self._pool.total_bytes())

    def allocate(self, nbytes: int) -> Block:
        """From a pool in the order of the stream."""
        with self._device, self._stream:
            return _Pooled(self._pool.malloc(nbytes))

    def managed(self, nbytes: int) -> Bytes:
        """Unified memory: pages lie where they were last used."""
        with self._device:
            memory = cupy.cuda.malloc_managed(max(nbytes, 1))
            _cuda.memsetAsync(memory.ptr, 0, nbytes, self._stream.ptr)
            self._stream.synchronize()
        room: Any = (ctypes.c_uint8 * max(nbytes, 1)).from_address(memory.ptr)
        room.memory = memory  # lives as long as any view of it
        view: Bytes = np.frombuffer(room, np.uint8)[:nbytes]
        return view

    def pinned(self, nbytes: int) -> Bytes:
        """From CuPy's pool of pinned memory."""
        with self._device:
            return np.frombuffer(cupy.cuda.alloc_pinned_memory(max(nbytes, 1)), np.uint8, nbytes)

    def upload(self, address: int, source: Bytes) -> None:
        """Does not wait."""
        with self._device:
            _cuda.memcpyAsync(address, source.ctypes.data, source.nbytes, _TO_DEVICE, self._stream.ptr)

    def download(self, target: Bytes, address: int) -> None:
        """Does not wait."""
        with self._device:
            _cuda.memcpyAsync(target.ctypes.data, address, target.nbytes, _TO_HOST, self._stream.ptr)

    def zero(self, address: int, nbytes: int) -> None:
        """Does not wait."""
        with self._device:
            _cuda.memsetAsync(address, 0, nbytes, self._stream.ptr)

    def function(self, source: str, name: str, defines: Mapping[str, object]) -> Any:
        """Built once per machine, loaded once per process."""
        key = (name, source, *sorted((define, str(value)) for define, value in defines.items()))
        if key not in self._functions:
            module = holding(source, name, defines)
            with self._device:
                if module not in self._modules:
                    found = built(module, self._capability, _cuda.driverGetVersion())
                    self._modules[module] = cupy.RawModule(path=str(found))
                self._functions[key] = self._modules[module].get_function(name)
        return self._functions[key]

    def launch(self, function: Any, blocks: int, threads: int, argument: int) -> None:
        """Does not wait."""
        with self._device, self._stream:
            function((blocks,), (threads,), (np.uint64(argument),))

    def synchronize(self) -> None:
        """Blocks this thread, without the interpreter's lock."""
        with self._device:
            self._stream.synchronize()

    def reaches(self, address: int) -> bool:
        """Memory of this device, whoever allocated it."""
        found = _cuda.pointerGetAttributes(address)
        return found.type in (_DEVICE, _MANAGED) and found.device == self._index

    def mark(self, stream: int) -> Any:
        """Recorded on the framework's stream."""
        with self._device:
            event = cupy.cuda.Event(disable_timing=True)
            _cuda.eventRecord(event.ptr, stream)
            return event

    def reached(self, event: Any) -> bool:
        """Asked, not waited for."""
        with self._device:
            return bool(event.done)

    def follow(self, event: Any) -> None:
        """This stream waits, the program does not."""
        with self._device:
            self._stream.wait_event(event)
