"""The driver of a CUDA device, and the protocols of the Python package that makes CUDA's calls for it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Protocol

from gradcomp.core.errors import ConfigError, DeviceError, StateError
from gradcomp.kernels.cuda.driver import Block, Bytes, Pool, lent_to
from gradcomp.kernels.cuda.modules import Module, built, holding

TO_DEVICE: Final = 1  # values of cudaMemcpyKind
TO_HOST: Final = 2
ON_DEVICE: Final = (2, 3)  # values of cudaMemoryType: a device's memory, or managed memory
SUCCESS: Final = 0  # values of cudaError
NOT_READY: Final = 600
CAPTURE_IMPLICIT: Final = 906  # error of calls on the default stream while another stream is captured

#: Priority of the stream. Lower numbers go first; CUDA clamps the number to the range that the device supports.
_HIGH_PRIORITY = -5


class OwnPool(Pool, Protocol):
    """The allocator of a CUDA package on one device."""

    def held_bytes(self) -> int:
        """Returns the bytes that it has taken from the device, in use or not; called while the device is current."""
        ...


class Cuda(Protocol):
    """The CUDA calls that the driver makes. :mod:`over_cupy` and :mod:`over_bindings` implement them.

    Failed calls raise one of ``errors``, with CUDA's text. Calls that name no device work on the thread's current one.
    """

    @property
    def errors(self) -> tuple[type[BaseException], ...]:
        """Returns the types of exceptions that failed calls raise."""
        ...

    def current_device(self) -> int:
        """Returns the calling thread's current device."""
        ...

    def set_device(self, index: int) -> None:
        """Makes a device the calling thread's current one."""
        ...

    def capability(self, index: int) -> int:
        """Returns the compute capability of a device, 90 for 9.0."""
        ...

    def processors(self, index: int) -> int:
        """Returns the number of a device's multiprocessors."""
        ...

    def version(self) -> int:
        """Returns the CUDA version that the installed driver supports, 13000 for 13.0."""
        ...

    def memory(self) -> tuple[int, int]:
        """Returns free and total bytes of the current device."""
        ...

    def owner(self, address: int) -> int | None:
        """Returns the device in whose memory an address is; None if it is in no device's."""
        ...

    def stream(self, priority: int) -> Any:
        """Returns a new non-blocking stream of this priority."""
        ...

    def handle(self, stream: Any) -> int:
        """Returns CUDA's handle of a stream."""
        ...

    def pool(self, stream: Any) -> OwnPool:
        """Returns the allocator for a stream, which is used if no framework lends its own."""
        ...

    def pinned(self, nbytes: int) -> Bytes:
        """Returns pinned memory of the host, from a pool."""
        ...

    def copy(self, target: int, source: int, nbytes: int, kind: int, stream: Any) -> None:
        """Starts a copy on the stream."""
        ...

    def zero(self, address: int, nbytes: int, stream: Any) -> None:
        """Starts setting bytes to zero on the stream."""
        ...

    def module(self, path: Path) -> Any:
        """Loads a module's code from a file."""
        ...

    def kernel(self, module: Any, name: str) -> Any:
        """Returns the function of a module that has this name."""
        ...

    def resident(self, kernel: Any, threads: int) -> int:
        """Returns how many blocks of a kernel without dynamic shared memory fit on one multiprocessor."""
        ...

    def launch(self, kernel: Any, blocks: int, threads: int, parameters: Bytes, stream: Any) -> None:
        """Launches a kernel with one argument, a struct that is passed by value."""
        ...

    def synchronize(self, stream: Any) -> None:
        """Waits for the stream's work, with the GIL released."""
        ...

    def record(self, stream: int) -> Any:
        """Records an event, with timing disabled, on the stream with this handle, and returns it."""
        ...

    def reached(self, event: Any) -> bool:
        """Returns whether an event has completed."""
        ...

    def follow(self, stream: Any, event: Any) -> None:
        """Makes later work on the stream wait for the event; the host does not wait."""
        ...

    def is_captured(self, stream: int) -> bool:
        """Returns whether a stream is captured into a graph; True for the default one while another is captured."""
        ...


class _Current:
    """Context manager: the device is the thread's current one inside it, and CUDA's errors become DeviceError."""

    __slots__ = ("_before", "_cuda", "_index")

    def __init__(self, cuda: Cuda, index: int) -> None:
        self._cuda, self._index = cuda, index

    def __enter__(self) -> None:
        self._before = self._cuda.current_device()
        if self._before != self._index:
            self._cuda.set_device(self._index)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before != self._index:
            self._cuda.set_device(self._before)
        if isinstance(error, self._cuda.errors):
            raise DeviceError(
                f"cuda:{self._index} failed: {error}. The error may come from an earlier kernel, of the script or of "
                "gradcomp: run again with CUDA_LAUNCH_BLOCKING=1 to see which"
            ) from error


class CudaDriver:
    """Implements :class:`gradcomp.kernels.cuda.driver.Driver` on one device; ConfigError if the device is not usable.

    Memory comes from the pool that a framework lent (see :mod:`gradcomp.kernels.cuda.driver`), else from
    :meth:`Cuda.pool`. Modules are loaded at their first use.
    """

    def __init__(self, cuda: Cuda, index: int) -> None:
        self._cuda, self._index = cuda, index
        refused: tuple[type[BaseException], ...] = (DeviceError, *cuda.errors)
        try:
            self._capability = cuda.capability(index)
            with self.current():
                # Other ranks wait for compressed gradients, so gradcomp's kernels go before those of backward().
                self._stream = cuda.stream(_HIGH_PRIORITY)
                self._pool = cuda.pool(self._stream)
        except refused as error:
            raise ConfigError(f"there is no usable cuda:{index}: {error}") from error
        self.stream = cuda.handle(self._stream)
        self._functions: dict[tuple[object, ...], Any] = {}
        self._modules: dict[Module, Any] = {}

    def current(self) -> _Current:
        """Returns a context manager in which the device is the thread's current one."""
        return _Current(self._cuda, self._index)

    def make_current(self) -> None:
        """Makes this the thread's current device. Threads start on device 0, where a call would create a context."""
        if self._cuda.current_device() != self._index:
            self._cuda.set_device(self._index)

    @property
    def pooled_bytes(self) -> int:
        """Returns the bytes that the pool of :meth:`Cuda.pool` holds, in use or not, without a lent pool's."""
        with self.current():
            return self._pool.held_bytes()

    def allocate(self, nbytes: int) -> Block:
        """Allocates for the stream. If no memory is left, waits for the stream, frees unused memory and retries."""
        with self.current():
            lent = lent_to(self._index)
            pool: Pool = self._pool if lent is None else lent
            try:
                return pool.allocate(nbytes, self.stream)
            except MemoryError:
                self._cuda.synchronize(self._stream)
                self._pool.release()
                if lent is not None:
                    lent.release()
            try:
                return pool.allocate(nbytes, self.stream)
            except MemoryError as error:
                raise DeviceError(self._full(nbytes, lent)) from error

    def _full(self, nbytes: int, lent: Pool | None) -> str:
        free, total = self._cuda.memory()
        beside = "" if lent is None else f"; {lent.describe()}"
        return (
            f"cuda:{self._index} has no memory for {nbytes} bytes: {free} of {total} are free; {self._pool.describe()}"
            f"{beside}. Free some: take a smaller batch, or a compressor that keeps less state"
        )

    def pinned(self, nbytes: int) -> Bytes:
        with self.current():
            return self._cuda.pinned(nbytes)

    def upload(self, address: int, source: Bytes) -> None:
        with self.current():
            self._cuda.copy(address, source.ctypes.data, source.nbytes, TO_DEVICE, self._stream)

    def download(self, target: Bytes, address: int) -> None:
        with self.current():
            self._cuda.copy(target.ctypes.data, address, target.nbytes, TO_HOST, self._stream)

    def zero(self, address: int, nbytes: int) -> None:
        with self.current():
            self._cuda.zero(address, nbytes, self._stream)

    def function(self, source: str, name: str, defines: Mapping[str, object]) -> Any:
        """Returns a kernel. Its module comes with the package or is built here; this driver loads it once."""
        key = (name, source, *sorted((define, str(value)) for define, value in defines.items()))
        if key not in self._functions:
            module = holding(source, name, defines)
            with self.current():
                if module not in self._modules:
                    found = built(module, self._capability, self._cuda.version())
                    self._modules[module] = self._cuda.module(found)
                self._functions[key] = self._cuda.kernel(self._modules[module], name)
        return self._functions[key]

    def resident(self, function: Any, threads: int) -> int:
        """Returns the number of the kernel's blocks that all multiprocessors run at a time, at least one."""
        with self.current():
            each = self._cuda.resident(function, threads)
            return max(1, each * self._cuda.processors(self._index))

    def launch(self, function: Any, blocks: int, threads: int, parameters: Bytes) -> None:
        with self.current():
            self._cuda.launch(function, blocks, threads, parameters, self._stream)

    def synchronize(self) -> None:
        """Blocks this thread until the stream's work is done, with the GIL released."""
        with self.current():
            self._cuda.synchronize(self._stream)

    def reaches(self, address: int) -> bool:
        with self.current():
            return self._cuda.owner(address) == self._index

    def mark(self, stream: int) -> Any:
        with self.current():
            if stream != self.stream and self._cuda.is_captured(stream):
                raise StateError(
                    "gradients cannot be handed in while their stream is captured into a CUDA graph: leave backward() "
                    "out of the graph, or gradcomp out of the captured part"
                )
            return self._cuda.record(stream)

    def reached(self, event: Any) -> bool:
        with self.current():
            return self._cuda.reached(event)

    def follow(self, event: Any) -> None:
        """Makes the driver's stream wait for the event; the host does not wait."""
        with self.current():
            self._cuda.follow(self._stream, event)


def index_of(cuda: Cuda, address: int) -> int:
    """Returns the number, in this process, of the device that holds an address; ConfigError if none does."""
    try:
        found = cuda.owner(address)
    except cuda.errors as error:
        raise ConfigError(f"CUDA cannot tell which device holds a gradient: {error}") from error
    if found is None:
        raise ConfigError(
            "the gradients are not in the memory of a CUDA device, and gradcomp supports no other GPUs"
        )
    return found
