"""Where gradients lie: the host's memory or a GPU's. Whoever exchanges them asks for memory and order here."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from time import perf_counter, sleep
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from gradcomp.core.errors import ConfigError
from gradcomp.core.vectors import Zeros, host_zeros
from gradcomp.kernels import bodies
from gradcomp.kernels.cuda.driver import Driver
from gradcomp.kernels.cuda.mirrors import mirror
from gradcomp.kernels.cuda.vectors import DeviceVector
from gradcomp.kernels.reference_memory import memory_at

T = TypeVar("T")

_INSTALL = "pip install 'gradcomp[cuda13]', or 'gradcomp[cuda12]' where CUDA is 12.x"


@dataclass(frozen=True)
class Device:
    """One place: its memory, its kernels and its order of work.

    ``name``: as frameworks write it. ``zeros``: allocates float32 in the memory that its kernels work on. ``kernels``:
    a GPU's; None of the host, whose kernels are those of :mod:`gradcomp.kernels`.
    """

    name: str
    zeros: Zeros = host_zeros
    driver: Driver | None = None
    kernels: Any = None

    @property
    def is_late(self) -> bool:
        """Whether gradients may still be computed when they are handed in; then they come with events."""
        return self.driver is not None

    def array(self, size: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Zeros for kernels: on a GPU nobody else may look at them."""
        dtype = np.dtype(dtype)
        if self.driver is None:
            return np.zeros(size, dtype=dtype)
        return mirror(self.driver, size * dtype.itemsize, ()).view(dtype)

    def make_current(self) -> None:
        """Let the calling thread, if it is one of gradcomp's own, work on this device from now on."""
        if self.driver is not None:
            self.driver.make_current()

    def bound(self, work: Callable[[], T]) -> Callable[[], T]:
        """``work``, for a thread of its own: on this device from the start."""

        def run() -> T:
            self.make_current()
            return work()

        return run

    def mark(self, stream: int) -> Any:
        """An event behind what a framework's stream holds by now; None where nothing runs beside this program."""
        return None if self.driver is None else self.driver.mark(stream)

    def reached(self, events: Iterable[Any]) -> bool:
        """Whether the frameworks' streams are behind the events by now."""
        driver = self.driver
        return driver is None or all(event is None or driver.reached(event) for event in events)

    def follow(self, events: Iterable[Any]) -> None:
        """No kernel that is called from now on begins before the events."""
        if self.driver is not None:
            for event in events:
                if event is not None:
                    self.driver.follow(event)

    def read(self, address: int, nbytes: int, event: Any = None) -> npt.NDArray[np.uint8]:
        """The bytes at an address, to be looked at now; blocks until ``event`` has come and the bytes are here."""
        if self.driver is None:
            while not self.reached([event]):
                sleep(1e-4)
            return memory_at(address, nbytes, np.dtype(np.uint8))
        self.follow([event])
        found = self.driver.pinned(nbytes)
        if nbytes:
            self.driver.download(found, address)
        self.driver.synchronize()
        return found

    def outlast(self, seconds: float) -> None:
        """Wait, but no longer than this, until what was called is done. Raises nothing: a device may have failed."""
        if self.driver is None:
            return
        with suppress(Exception):
            event, deadline = self.driver.mark(self.driver.stream), perf_counter() + seconds
            while not self.driver.reached(event) and perf_counter() < deadline:
                sleep(1e-4)


HOST = Device("cpu")


@cache
def cuda(index: int) -> Device:
    """GPU number ``index`` of this process; ConfigError, naming what to install, if its kernels cannot run."""
    return on(f"cuda:{index}", _package(f"gradients on cuda:{index}").driver(index))


def cuda_at(address: int) -> Device:
    """The GPU in whose memory an address is, whatever others call it; ConfigError as for :func:`cuda`, or without."""
    return cuda(_package("GPUs").index_of(address))


def _package(who: str) -> Any:
    """The module that calls CUDA: over CuPy if that is installed, else over NVIDIA's bindings; ConfigError without."""
    try:
        from gradcomp.kernels.cuda import over_cupy
    except ImportError as error:
        try:
            from gradcomp.kernels.cuda import over_bindings
        except ImportError:
            raise ConfigError(f"{who} need CuPy or cuda-bindings: {_INSTALL} ({error})") from error
        return over_bindings
    return over_cupy


def on(name: str, driver: Driver) -> Device:
    """The device behind a driver; kernels that are not told where to run do so there for tables of its memory."""
    from gradcomp.kernels.cuda.body import CudaKernels

    kernels = CudaKernels(driver)
    bodies.bring(name, kernels, driver.reaches)
    return Device(name, partial(DeviceVector.zeros, driver), driver, kernels)
