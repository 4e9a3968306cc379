"""The driver over CuPy: one device, one stream, modules compiled by NVRTC when they are first needed."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any

import cupy
import numpy as np
from cupy.cuda import driver as _driver
from cupy.cuda import runtime as _cuda

from gradcomp.core.errors import ConfigError, DeviceError, StateError
from gradcomp.kernels.cuda import pools
from gradcomp.kernels.cuda.built import built
from gradcomp.kernels.cuda.driver import Block, Bytes
from gradcomp.kernels.cuda.modules import Module, holding

_TO_DEVICE, _TO_HOST = 1, 2  # of cudaMemcpyKind
_DEVICE, _MANAGED = 2, 3  # of cudaMemoryType
_SUCCESS, _NOT_READY, _CAPTURE_IMPLICIT = 0, 600, 906  # of cudaError

#: Streams begin the kernels of those with lower numbers first; CUDA takes the nearest number that the device has.
_HIGH_PRIORITY = -5

_ERRORS = (_cuda.CUDARuntimeError, _driver.CUDADriverError)


def index_of(address: int) -> int:
    """The number, in this process, of the device in whose memory an address is; ConfigError if none is."""
    try:
        found = _cuda.pointerGetAttributes(address)
    except _cuda.CUDARuntimeError as error:
        raise ConfigError(f"CUDA cannot be asked whose memory it is: {error}") from error
    if found.type not in (_DEVICE, _MANAGED):
        raise ConfigError("what lies on a GPU is not in the memory of a CUDA device")
    return int(found.device)


class _Current:
    """Inside, a device is the thread's current one; what CUDA says there is a DeviceError."""

    __slots__ = ("_before", "_index")

    def __init__(self, index: int) -> None:
        self._index = index

    def __enter__(self) -> None:
        self._before = _cuda.getDevice()
        if self._before != self._index:
            _cuda.setDevice(self._index)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before != self._index:
            _cuda.setDevice(self._before)
        if isinstance(error, _ERRORS):
            raise _failure(self._index, error) from error


def _failure(index: int, error: BaseException) -> DeviceError:
    return DeviceError(
        f"cuda:{index} failed: {error}. The error may come from an earlier kernel, of the script or of gradcomp: "
        "run again with CUDA_LAUNCH_BLOCKING=1 to see which"
    )


class _Pooled:
    """Memory of CuPy's pool."""

    def __init__(self, memory: Any) -> None:
        self._memory = memory
        self.address = int(memory.ptr)


class CupyDriver:
    """See :class:`gradcomp.kernels.cuda.driver.Driver`. ConfigError without a device.

    Memory comes from the pool that a framework lent (see :mod:`gradcomp.kernels.cuda.pools`), else from one of CuPy's.
    """

    def __init__(self, index: int) -> None:
        try:
            device = cupy.cuda.Device(index)
            self._capability = int(device.compute_capability)
            self._index = index
            with self.current():
                # What is compressed is waited for, so it goes before what backward() has queued.
                self._stream = cupy.cuda.Stream(non_blocking=True, priority=_HIGH_PRIORITY)
                self._pool = cupy.cuda.MemoryPool()
        except (_cuda.CUDARuntimeError, DeviceError) as error:
            raise ConfigError(f"there is no usable cuda:{index}: {error}") from error
        self._functions: dict[tuple[object, ...], Any] = {}
        self._modules: dict[Module, Any] = {}

    def current(self) -> _Current:
        """To be entered: inside, the device is the thread's current one, and afterwards the one before is again."""
        return _Current(self._index)

    def make_current(self) -> None:
        """CUDA makes a context on whatever device a thread returns to, and threads begin on number 0."""
        if _cuda.getDevice() != self._index:
            _cuda.setDevice(self._index)

    @property
    def stream(self) -> int:
        """The handle of the stream on which all of it runs."""
        return int(self._stream.ptr)

    @property
    def pooled_bytes(self) -> int:
        """Memory that CuPy's pool has taken from the device: its peak, until memory is full."""
        with self.current():
            return int(self._pool.total_bytes())

    def allocate(self, nbytes: int) -> Block:
        """In the order of the stream; from a full pool a second time, when what is kept and not in use was freed."""
        with self.current():
            pool = pools.lent(self._index)
            try:
                return self._taken(nbytes, pool)
            except MemoryError:
                self._stream.synchronize()
                self._pool.free_all_blocks()
                if pool is not None:
                    pool.release()
            try:
                return self._taken(nbytes, pool)
            except MemoryError as error:
                raise DeviceError(self._full(nbytes, pool)) from error

    def _taken(self, nbytes: int, pool: pools.Pool | None) -> Block:
        if pool is not None:
            return pool.allocate(nbytes, self.stream)
        with self._stream:
            return _Pooled(self._pool.malloc(nbytes))

    def _full(self, nbytes: int, pool: pools.Pool | None) -> str:
        free, total = _cuda.memGetInfo()
        held, used = self._pool.total_bytes(), self._pool.used_bytes()
        beside = "" if pool is None else f"; {pool.describe()}"
        return (
            f"cuda:{self._index} has no room for {nbytes} bytes: {free} of {total} are free; gradcomp's own pool holds "
            f"{held}, {used} of them in use{beside}. Leave more: a smaller batch, or a compressor that keeps less state"
        )

    def pinned(self, nbytes: int) -> Bytes:
        """From CuPy's pool of pinned memory."""
        with self.current():
            return np.frombuffer(cupy.cuda.alloc_pinned_memory(max(nbytes, 1)), np.uint8, nbytes)

    def upload(self, address: int, source: Bytes) -> None:
        """Does not wait."""
        with self.current():
            _cuda.memcpyAsync(address, source.ctypes.data, source.nbytes, _TO_DEVICE, self._stream.ptr)

    def download(self, target: Bytes, address: int) -> None:
        """Does not wait."""
        with self.current():
            _cuda.memcpyAsync(target.ctypes.data, address, target.nbytes, _TO_HOST, self._stream.ptr)

    def zero(self, address: int, nbytes: int) -> None:
        """Does not wait."""
        with self.current():
            _cuda.memsetAsync(address, 0, nbytes, self._stream.ptr)

    def function(self, source: str, name: str, defines: Mapping[str, object]) -> Any:
        """Built once per machine, loaded once per process."""
        key = (name, source, *sorted((define, str(value)) for define, value in defines.items()))
        if key not in self._functions:
            module = holding(source, name, defines)
            with self.current():
                if module not in self._modules:
                    found = built(module, self._capability, _cuda.driverGetVersion())
                    self._modules[module] = cupy.RawModule(path=str(found))
                self._functions[key] = self._modules[module].get_function(name)
        return self._functions[key]

    def resident(self, function: Any, threads: int) -> int:
        """On all processors, by the registers and the shared memory that the kernel takes."""
        with self.current():
            each = int(_driver.occupancyMaxActiveBlocksPerMultiprocessor(function.kernel.ptr, threads, 0))
            processors = int(_cuda.deviceGetAttribute(_cuda.cudaDevAttrMultiProcessorCount, self._index))
            return max(1, each * processors)

    def launch(self, function: Any, blocks: int, threads: int, parameters: Bytes) -> None:
        """Does not wait."""
        struct = parameters.view(
            np.dtype((np.void, len(parameters)))
        )  # CuPy passes arrays of one element by value
        with self.current(), self._stream:
            function((blocks,), (threads,), (struct,))

    def synchronize(self) -> None:
        """Blocks this thread, without the interpreter's lock."""
        with self.current():
            self._stream.synchronize()

    def reaches(self, address: int) -> bool:
        """Memory of this device, whoever allocated it."""
        with self.current():
            found = _cuda.pointerGetAttributes(address)
        return found.type in (_DEVICE, _MANAGED) and found.device == self._index

    def mark(self, stream: int) -> Any:
        """Recorded on the framework's stream."""
        with self.current():
            if stream != self.stream and self._captured(stream):
                raise StateError(
                    "gradients cannot be handed in while their stream is captured into a CUDA graph: leave backward() "
                    "out of the graph, or gradcomp out of the captured part"
                )
            event = cupy.cuda.Event(disable_timing=True)
            _cuda.eventRecord(event.ptr, stream)
            return event

    @staticmethod
    def _captured(stream: int) -> bool:
        try:
            return bool(_cuda.streamIsCapturing(stream))
        except _cuda.CUDARuntimeError as error:
            # Of the default stream CUDA does not tell while another one is captured.
            if error.status == _CAPTURE_IMPLICIT:
                return True
            raise

    def reached(self, event: Any) -> bool:
        """Asked, not waited for."""
        with self.current():
            status = _cuda.eventQuery(event.ptr)
            if status not in (_SUCCESS, _NOT_READY):
                raise _cuda.CUDARuntimeError(status)
            return bool(status == _SUCCESS)

    def follow(self, event: Any) -> None:
        """This stream waits, the program does not."""
        with self.current():
            self._stream.wait_event(event)
