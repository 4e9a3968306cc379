"""Where benchmarks/gpu.py runs: a GPU, or the tests' stand-in for one, with its clock."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from gradcomp.kernels import devices
from gradcomp.kernels.cuda.backend import CudaKernels

ROOT = Path(__file__).resolve().parent.parent

#: Keeps the device busy for a millisecond, in which Python queues all launches of a call: no gap is left between them.
_SPIN = r"""
extern "C" __global__ void spin(unsigned long long nanoseconds) {
    unsigned long long begin, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
    do {
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    } while (now - begin < nanoseconds);
}
"""
_SPIN_NANOSECONDS = 1_000_000


class Array:
    """Memory of the device with the words that CuPy and torch understand, and that kernels' calls do."""

    def __init__(self, driver: Any, length: int, dtype: Any, *, part: tuple[Any, int] | None = None) -> None:
        self.dtype = np.dtype(dtype)
        self.itemsize, self.nbytes, self._length = self.dtype.itemsize, length * self.dtype.itemsize, length
        self._driver = driver
        self._block, offset = part or (driver.allocate(max(self.nbytes, 1)), 0)
        self.address = self._block.address + offset
        self._offset = offset

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "version": 3,
            "shape": (self._length,),
            "typestr": self.dtype.str,
            "data": (self.address, False),
            "strides": None,
        }

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, where: slice) -> Array:
        begin, end, _ = where.indices(self._length)
        offset = self._offset + begin * self.itemsize
        return Array(self._driver, end - begin, self.dtype, part=(self._block, offset))

    def write(self, values: Any) -> None:
        staged = self._driver.pinned(self.nbytes)
        staged[:] = np.ascontiguousarray(values, self.dtype).view(np.uint8)
        self._driver.upload(self.address, staged)
        self._driver.synchronize()

    def read(self) -> Any:
        staged = self._driver.pinned(self.nbytes)
        self._driver.download(staged, self.address)
        self._driver.synchronize()
        return staged.view(self.dtype).copy()


class _Watched:
    """A driver that notes when the launches of a call begin and end, on the device."""

    def __init__(self, driver: Any, now: Callable[[], Any], between: Callable[[Any, Any], float]) -> None:
        self._driver, self._now, self._between = driver, now, between
        self.before_first: Callable[[], None] = lambda: None
        self.launched = 0
        self.milliseconds = 0.0
        self._first: Any = None
        self._last: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._driver, name)

    def launch(self, *arguments: Any) -> None:
        if self._first is None:
            self.before_first()
            self._first = self._now()
        self._driver.launch(*arguments)
        self._last = self._now()
        self.launched += 1

    def synchronize(self) -> None:
        self._driver.synchronize()
        if self._first is not None:
            self.milliseconds += self._between(self._first, self._last)
            self._first = self._last = None


class Machine:
    """A device with its kernels; `about` says what it is."""

    def __init__(
        self, driver: Any, now: Callable[[], Any], between: Callable[[Any, Any], float], about: dict[str, str]
    ) -> None:
        self.driver = _Watched(driver, now, between)
        self.body: Any = CudaKernels(self.driver)
        self.about = about
        self._now, self._between = now, between

    def array(self, length: int, dtype: Any = np.float32, values: Any = None) -> Array:
        found = Array(self.driver, length, dtype)
        if values is not None:
            found.write(values)
        return found

    def timed(self, function: Callable[[], Any]) -> tuple[float, float]:
        """Milliseconds of the launches in it, or of what it does on the stream itself; and of the wall's clock.

        It runs twice: behind a kernel that spins, for the device, and as it is, for the wall.
        """
        self.driver.milliseconds = 0.0
        self.driver.before_first = self.spin
        self.spin()
        first = self._now()
        function()
        last = self._now()
        self.driver.synchronize()
        device = self.driver.milliseconds or self._between(first, last)
        self.driver.before_first = lambda: None
        begin = time.perf_counter()
        function()
        self.driver.synchronize()
        return device, 1e3 * (time.perf_counter() - begin)

    def spin(self) -> None:
        """Keep the stream busy for a millisecond, where Python is slower than the device."""

    # -- yardsticks, on the same stream --------------------------------------------------------------------------

    def copy(self, target: Array, source: Array) -> None:
        raise NotImplementedError

    def add(self, target: Array, a: Array, b: Array) -> None:
        raise NotImplementedError

    def torch_tensor(self, array: Array) -> Any:
        """torch's view of an array; None where torch has no such device."""
        return None

    def torch_top(self, tensor: Any, count: int, *, in_order: bool) -> None:
        raise NotImplementedError


class _Real(Machine):
    def __init__(self, index: int) -> None:
        driver: Any = devices.cuda(index).driver
        import cupy

        self._cupy = cupy
        self._device = cupy.cuda.Device(index)
        self._device.use()
        self._stream = cupy.cuda.ExternalStream(driver.stream, index)
        self._spin = cupy.RawKernel(_SPIN, "spin")
        runtime = cupy.cuda.runtime
        name = runtime.getDeviceProperties(index)["name"]

        def now() -> Any:
            event = cupy.cuda.Event()
            runtime.eventRecord(event.ptr, driver.stream)
            return event

        def between(first: Any, last: Any) -> float:
            last.synchronize()
            return float(cupy.cuda.get_elapsed_time(first, last))

        about = {
            "GPU": name.decode() if isinstance(name, bytes) else str(name),
            "CUDA of the driver": _version(runtime.driverGetVersion()),
            "driver": _kernel_module(),
            "CUDA runtime": _version(runtime.runtimeGetVersion()),
            "CuPy": cupy.__version__,
        }
        super().__init__(driver, now, between, about)

    def spin(self) -> None:
        with self._stream:
            self._spin((1,), (1,), (self._cupy.uint64(_SPIN_NANOSECONDS),))

    def copy(self, target: Array, source: Array) -> None:
        self._cupy.cuda.runtime.memcpyAsync(
            target.address, source.address, source.nbytes, 3, self.driver.stream
        )

    def add(self, target: Array, a: Array, b: Array) -> None:
        c, a, b = map(self._cupy.asarray, (target, a, b))
        with self._stream:
            self._cupy.add(a, b, out=c)

    def torch_tensor(self, array: Array) -> Any:
        try:
            import torch
        except ImportError:
            return None
        return torch.as_tensor(array, device=f"cuda:{self._device.id}") if torch.cuda.is_available() else None

    def torch_top(self, tensor: Any, count: int, *, in_order: bool) -> None:
        import torch

        with torch.cuda.stream(torch.cuda.ExternalStream(self.driver.stream, device=tensor.device)):
            torch.topk(tensor.abs(), count, sorted=in_order)


class _StandIn(Machine):
    def __init__(self) -> None:
        sys.path.insert(0, str(ROOT / "tests"))
        from cuda_on_cpu.driver import CpuDriver

        driver = CpuDriver(ROOT / "build" / "cuda_on_cpu")
        super().__init__(driver, time.perf_counter, lambda a, b: 1e3 * (b - a), {"GPU": "none (stand-in)"})

    def copy(self, target: Array, source: Array) -> None:
        target.write(source.read())

    def add(self, target: Array, a: Array, b: Array) -> None:
        target.write(a.read() + b.read())


def real(index: int) -> Machine:
    """The GPU of that number; ConfigError if kernels cannot run on it."""
    return _Real(index)


def stand_in() -> Machine:
    """The kernels on the CPU: what is right there is right, what is quick is nobody's business."""
    return _StandIn()


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def _kernel_module() -> str:
    file = Path("/proc/driver/nvidia/version")
    if not file.is_file():
        return "unknown"
    words = file.read_text().splitlines()[0].split()
    return next((word for word in words if word[0].isdigit() and "." in word), "unknown")
