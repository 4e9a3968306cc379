"""CuPy over a runtime that notes its calls, to run the driver's own code where there is no GPU."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np


class RuntimeFailure(RuntimeError):
    """CUDARuntimeError, with CUDA's text."""

    TEXTS = {700: "cudaErrorIllegalAddress: an illegal memory access was encountered"}

    def __init__(self, status: int) -> None:
        self.status = status
        super().__init__(self.TEXTS.get(status, f"status {status}"))


class DriverFailure(RuntimeError):
    """CUDADriverError."""


class Fake:
    """The modules, and what happened. ``devices_used``: all that some thread made current."""

    def __init__(self) -> None:
        self._thread = threading.local()
        self.devices_used: set[int] = set()
        self.capturing: set[int] = set()
        self.event_status = 0
        self.free = 1 << 30  # bytes that the pool can still take
        self.streams: list[dict[str, Any]] = []
        self.events = 0
        self.freed = 0
        fake = self

        class Stream:
            ptr = 77

            def __init__(self, **settings: Any) -> None:
                fake.streams.append(settings)

            def __enter__(self) -> None: ...

            def __exit__(self, *_: Any) -> None: ...

            def synchronize(self) -> None:
                fake.check()

        class Pool:
            def __init__(self) -> None:
                self.of = fake.get_device()

            def malloc(self, nbytes: int) -> Any:
                if nbytes > fake.free:
                    raise MemoryError(f"no {nbytes} bytes")
                return SimpleNamespace(ptr=1 << 20)

            def free_all_blocks(self) -> None:
                fake.freed += 1

            def total_bytes(self) -> int:
                """Of the current device, as CuPy has it."""
                return 4096 if fake.get_device() == self.of else 0

            used_bytes = total_bytes

        class Event:
            def __init__(self, **_: Any) -> None:
                fake.events += 1
                self.ptr = fake.events

        self.runtime = SimpleNamespace(
            CUDARuntimeError=RuntimeFailure,
            cudaDevAttrMultiProcessorCount=16,
            deviceGetAttribute=lambda attribute, index: {(16, 1): 132}[attribute, index],
            getDevice=self.get_device,
            setDevice=self.set_device,
            memGetInfo=lambda: (123, 456),
            eventQuery=lambda event: self.event_status,
            eventRecord=lambda event, stream: None,
            streamIsCapturing=self.is_capturing,
            memcpyAsync=lambda *_: self.check(),
            memsetAsync=lambda *_: self.check(),
        )
        self.status = 0
        self.launch_status = 0
        self.cupy: Any = ModuleType("cupy")
        self.cuda: Any = ModuleType("cupy.cuda")
        self.cupy.cuda = self.cuda
        self.cuda.runtime = self.runtime
        self.asked: list[tuple[int, int, int]] = []  # what kernels take of a processor
        self.blocks = 3  # of a kernel that it holds
        self.cuda.driver = SimpleNamespace(
            CUDADriverError=DriverFailure,
            occupancyMaxActiveBlocksPerMultiprocessor=lambda *given: self.asked.append(given) or self.blocks,
        )
        self.cuda.nvrtc = SimpleNamespace()
        self.cuda.Device = lambda index: SimpleNamespace(id=index, compute_capability="90")
        self.cuda.Stream, self.cuda.Event, self.cuda.MemoryPool = Stream, Event, Pool
        self.cuda.alloc_pinned_memory = lambda nbytes: np.zeros(nbytes, np.uint8)

    def get_device(self) -> int:
        return getattr(self._thread, "device", 0)

    def set_device(self, index: int) -> None:
        self._thread.device = index
        self.devices_used.add(index)

    def is_capturing(self, stream: int) -> bool:
        if self.capturing and stream == 0:
            raise RuntimeFailure(906)
        return stream in self.capturing

    def check(self) -> None:
        if self.status:
            raise RuntimeFailure(self.status)


@contextmanager
def installed() -> Iterator[tuple[Fake, Any]]:
    """The fake, and what makes the driver over it."""
    fake = Fake()
    ours = ["gradcomp.kernels.cuda.over_cupy"]
    theirs = {"cupy": fake.cupy, "cupy.cuda": fake.cuda}
    before = {name: sys.modules.pop(name, None) for name in (*ours, *theirs)}
    sys.modules.update(theirs)
    try:
        from gradcomp.kernels.cuda.over_cupy import driver

        yield fake, driver
    finally:
        for name, module in before.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module
