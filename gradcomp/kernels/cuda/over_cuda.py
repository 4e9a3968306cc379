"""The driver over CUDA: one device, one stream, modules that are loaded when they are first needed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Protocol

from gradcomp.core.errors import ConfigError, DeviceError, StateError
from gradcomp.kernels.cuda import pools
from gradcomp.kernels.cuda.built import built
from gradcomp.kernels.cuda.driver import Block, Bytes
from gradcomp.kernels.cuda.modules import Module, holding

TO_DEVICE: Final = 1  # of cudaMemcpyKind
TO_HOST: Final = 2
ON_DEVICE: Final = (2, 3)  # of cudaMemoryType: a device's, or managed
SUCCESS: Final = 0  # of cudaError
NOT_READY: Final = 600
CAPTURE_IMPLICIT: Final = 906  # the default stream, while another one is captured

#: Streams begin the kernels of those with lower numbers first; CUDA takes the nearest number that the device has.
_HIGH_PRIORITY = -5


class OwnPool(pools.Pool, Protocol):
    """A package's allocator on one device."""

    def held_bytes(self) -> int:
        """What it has taken from the device, in use or not; asked while the device is current."""
        ...


class Cuda(Protocol):
    """CUDA's calls, as a package for Python offers them: :mod:`over_cupy`, or :mod:`over_bindings`.

    ``errors``: what a call raises that CUDA refuses, with CUDA's text. Calls that name no device work on the thread's
    current one.
    """

    @property
    def errors(self) -> tuple[type[BaseException], ...]:
        """What calls raise."""
        ...

    def current_device(self) -> int:
        """The calling thread's."""
        ...

    def set_device(self, index: int) -> None:
        """Make a device the calling thread's."""
        ...

    def capability(self, index: int) -> int:
        """90 for 9.0."""
        ...

    def processors(self, index: int) -> int:
        """How many multiprocessors a device has."""
        ...

    def version(self) -> int:
        """What the installed driver knows: 13000 for 13.0."""
        ...

    def memory(self) -> tuple[int, int]:
        """Free bytes of the device, and all."""
        ...

    def owner(self, address: int) -> int | None:
        """The device in whose memory an address is; None if it is in no device's."""
        ...

    def stream(self, priority: int) -> Any:
        """A new stream, which does not wait for the default one."""
        ...

    def handle(self, stream: Any) -> int:
        """CUDA's own name of a stream."""
        ...

    def pool(self, stream: Any) -> OwnPool:
        """Where a stream's memory comes from if no framework lends it."""
        ...

    def pinned(self, nbytes: int) -> Bytes:
        """Memory of the host, from a pool."""
        ...

    def copy(self, target: int, source: int, nbytes: int, kind: int, stream: Any) -> None:
        """Start a copy."""
        ...

    def zero(self, address: int, nbytes: int, stream: Any) -> None:
        """Start to set bytes to zero."""
        ...

    def module(self, path: Path) -> Any:
        """Load code from a file."""
        ...

    def kernel(self, module: Any, name: str) -> Any:
        """A function of a module."""
        ...

    def resident(self, kernel: Any, threads: int) -> int:
        """How many blocks of a kernel a multiprocessor holds."""
        ...

    def launch(self, kernel: Any, blocks: int, threads: int, parameters: Bytes, stream: Any) -> None:
        """Start a kernel with one argument, a struct that is passed by value."""
        ...

    def synchronize(self, stream: Any) -> None:
        """Wait, without the interpreter's lock."""
        ...

    def record(self, stream: int) -> Any:
        """An event behind what a stream holds by now; ``stream`` is a handle."""
        ...

    def reached(self, event: Any) -> bool:
        """Whether an event has come."""
        ...

    def follow(self, stream: Any, event: Any) -> None:
        """What is started on the stream from now on waits for the event."""
        ...

    def is_captured(self, stream: int) -> bool:
        """Whether a stream is captured into a graph, or is the default one, of which CUDA does not tell, beside one."""
        ...


class _Current:
    """Inside, a device is the thread's current one; what CUDA says there is a DeviceError."""

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
    """See :class:`gradcomp.kernels.cuda.driver.Driver`. ConfigError without a device.

    Memory comes from the pool that a framework lent (see :mod:`gradcomp.kernels.cuda.pools`), else from the package's.
    """

    def __init__(self, cuda: Cuda, index: int) -> None:
        self._cuda, self._index = cuda, index
        refused: tuple[type[BaseException], ...] = (DeviceError, *cuda.errors)
        try:
            self._capability = cuda.capability(index)
            with self.current():
                # What is compressed is waited for, so it goes before what backward() has queued.
                self._stream = cuda.stream(_HIGH_PRIORITY)
                self._pool = cuda.pool(self._stream)
        except refused as error:
            raise ConfigError(f"there is no usable cuda:{index}: {error}") from error
        self.stream = cuda.handle(self._stream)
        self._functions: dict[tuple[object, ...], Any] = {}
        self._modules: dict[Module, Any] = {}

    def current(self) -> _Current:
        """To be entered: inside, the device is the thread's current one, and afterwards the one before is again."""
        return _Current(self._cuda, self._index)

    def make_current(self) -> None:
        """CUDA makes a context on whatever device a thread returns to, and threads begin on number 0."""
        if self._cuda.current_device() != self._index:
            self._cuda.set_device(self._index)

    @property
    def pooled_bytes(self) -> int:
        """Memory that the package's pool has taken from the device: its peak, until memory is full."""
        with self.current():
            return self._pool.held_bytes()

    def allocate(self, nbytes: int) -> Block:
        """In the order of the stream; from a full pool a second time, when what is kept and not in use was freed."""
        with self.current():
            lent = pools.lent(self._index)
            pool: pools.Pool = self._pool if lent is None else lent
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

    def _full(self, nbytes: int, lent: pools.Pool | None) -> str:
        free, total = self._cuda.memory()
        beside = "" if lent is None else f"; {lent.describe()}"
        return (
            f"cuda:{self._index} has no room for {nbytes} bytes: {free} of {total} are free; {self._pool.describe()}"
            f"{beside}. Leave more: a smaller batch, or a compressor that keeps less state"
        )

    def pinned(self, nbytes: int) -> Bytes:
        """From the package's pool of pinned memory."""
        with self.current():
            return self._cuda.pinned(nbytes)

    def upload(self, address: int, source: Bytes) -> None:
        """Does not wait."""
        with self.current():
            self._cuda.copy(address, source.ctypes.data, source.nbytes, TO_DEVICE, self._stream)

    def download(self, target: Bytes, address: int) -> None:
        """Does not wait."""
        with self.current():
            self._cuda.copy(target.ctypes.data, address, target.nbytes, TO_HOST, self._stream)

    def zero(self, address: int, nbytes: int) -> None:
        """Does not wait."""
        with self.current():
            self._cuda.zero(address, nbytes, self._stream)

    def function(self, source: str, name: str, defines: Mapping[str, object]) -> Any:
        """Built once per machine, loaded once per process."""
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
        """On all processors, by the registers and the shared memory that the kernel takes."""
        with self.current():
            each = self._cuda.resident(function, threads)
            return max(1, each * self._cuda.processors(self._index))

    def launch(self, function: Any, blocks: int, threads: int, parameters: Bytes) -> None:
        """Does not wait."""
        with self.current():
            self._cuda.launch(function, blocks, threads, parameters, self._stream)

    def synchronize(self) -> None:
        """Blocks this thread, without the interpreter's lock."""
        with self.current():
            self._cuda.synchronize(self._stream)

    def reaches(self, address: int) -> bool:
        """Memory of this device, whoever allocated it."""
        with self.current():
            return self._cuda.owner(address) == self._index

    def mark(self, stream: int) -> Any:
        """Recorded on the framework's stream."""
        with self.current():
            if stream != self.stream and self._cuda.is_captured(stream):
                raise StateError(
                    "gradients cannot be handed in while their stream is captured into a CUDA graph: leave backward() "
                    "out of the graph, or gradcomp out of the captured part"
                )
            return self._cuda.record(stream)

    def reached(self, event: Any) -> bool:
        """Asked, not waited for."""
        with self.current():
            return self._cuda.reached(event)

    def follow(self, event: Any) -> None:
        """This stream waits, the program does not."""
        with self.current():
            self._cuda.follow(self._stream, event)


def index_of(cuda: Cuda, address: int) -> int:
    """The number, in this process, of the device in whose memory an address is; ConfigError if none is."""
    try:
        found = cuda.owner(address)
    except cuda.errors as error:
        raise ConfigError(f"CUDA cannot be asked whose memory it is: {error}") from error
    if found is None:
        raise ConfigError("what lies on a GPU is not in the memory of a CUDA device")
    return found
