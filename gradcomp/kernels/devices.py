"""Devices that gradients lie on: the host or a GPU, with the memory, the kernels and the order of work of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property, partial
from time import perf_counter, sleep
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from gradcomp.core.errors import ConfigError
from gradcomp.core.vectors import Zeros, host_zeros
from gradcomp.kernels.cuda.driver import Driver
from gradcomp.kernels.cuda.mirrors import mirror
from gradcomp.kernels.cuda.vectors import DeviceVector
from gradcomp.kernels.dispatch import HOST_KERNELS, Kernels
from gradcomp.kernels.reference_memory import memory_at

T = TypeVar("T")

_INSTALL = "pip install 'gradcomp[cuda13]', or 'gradcomp[cuda12]' where CUDA is 12.x"


@dataclass(frozen=True)
class Device:
    """One device: its memory, its kernels and its order of work.

    ``name`` is written as frameworks do. ``zeros`` allocates float32 in the memory that the device's kernels work on.
    Without ``driver`` the device has no kernels of its own, and ``kernels`` are the host's.
    """

    name: str
    zeros: Zeros = host_zeros
    driver: Driver | None = None
    kernels: Kernels = HOST_KERNELS

    @cached_property
    def is_late(self) -> bool:
        """Returns whether submitted gradients may still be in computation; they then come with events."""
        return self.driver is not None

    def array(self, size: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Returns zeros for kernels; those on a GPU are accessed by kernels only."""
        dtype = np.dtype(dtype)
        if self.driver is None:
            return np.zeros(size, dtype=dtype)
        return mirror(self.driver, size * dtype.itemsize, ()).view(dtype)

    def make_current(self) -> None:
        """Makes this device the calling thread's current one; for gradcomp's own threads."""
        if self.driver is not None:
            self.driver.make_current()

    def bound(self, work: Callable[[], T]) -> Callable[[], T]:
        """Returns ``work`` for a thread of its own, with this device as its current one from the start."""

        def run() -> T:
            self.make_current()
            return work()

        return run

    def mark(self, stream: int) -> Any:
        """Returns an event recorded after the present work of a framework's stream; None on the host."""
        return None if self.driver is None else self.driver.mark(stream)

    def reached(self, events: Iterable[Any]) -> bool:
        """Returns whether all the events have completed."""
        driver = self.driver
        return driver is None or all(event is None or driver.reached(event) for event in events)

    def follow(self, events: Iterable[Any]) -> None:
        """Makes all kernels that are called from now on wait for the events."""
        if self.driver is not None:
            for event in events:
                if event is not None:
                    self.driver.follow(event)

    def read(self, address: int, nbytes: int, event: Any = None) -> npt.NDArray[np.uint8]:
        """Returns the bytes at an address; blocks until ``event`` has completed and the bytes are on the host."""
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
        """Waits at most ``seconds`` for all started work. It raises no error, because the device may have failed."""
        if self.driver is None:
            return
        with suppress(Exception):
            event, deadline = self.driver.mark(self.driver.stream), perf_counter() + seconds
            while not self.driver.reached(event) and perf_counter() < deadline:
                sleep(1e-4)


HOST = Device("cpu")


@cache
def cuda(index: int) -> Device:
    """Returns GPU number ``index`` of this process; ConfigError, naming what to install, if its kernels cannot run."""
    return on(f"cuda:{index}", _package(f"gradients on cuda:{index}").driver(index))


def cuda_at(address: int) -> Device:
    """Returns the GPU that holds an address; ConfigError as from :func:`cuda`, or if no GPU holds it."""
    return cuda(_package("GPUs").index_of(address))


def _package(who: str) -> Any:
    """Returns the module that calls CUDA: through CuPy if installed, else NVIDIA's bindings; else ConfigError."""
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
    """Returns the device that a driver controls."""
    from gradcomp.kernels.cuda.backend import CudaKernels

    kernels: Any = CudaKernels(driver)
    return Device(name, partial(DeviceVector.zeros, driver), driver, kernels)
