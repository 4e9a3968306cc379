"""A device that does nothing but count, and ranks of one process whose messages stay on it.

What is left of a step is the program itself: its Python, and the host's copies of tables, flags and headers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from gradcomp.kernels import bodies, devices
from gradcomp.kernels.cuda.mirrors import is_mirror, mirror
from gradcomp.kernels.cuda.modules import Module, holding
from gradcomp.transport.base import Allocator
from gradcomp.transport.inprocess import InProcessTransport, World

_FIRST_ADDRESS = 1 << 44
_RESIDENT = 3 * 132  # blocks; three on each processor of an H100


class Block:
    """Memory that is not there."""

    def __init__(self, address: int) -> None:
        self.address = address


class NullDriver:
    """See :class:`gradcomp.kernels.cuda.driver.Driver`. ``calls`` counts by kind, ``copied`` bytes by direction."""

    stream = 1 << 20

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.copied: Counter[str] = Counter()
        self._loaded: set[Module] = set()
        self._next = _FIRST_ADDRESS

    def make_current(self) -> None:
        self.calls["current"] += 1

    def allocate(self, nbytes: int) -> Block:
        self.calls["allocate"] += 1
        block = Block(self._next)
        self._next += -(-nbytes // 256) * 256
        return block

    def pinned(self, nbytes: int) -> np.ndarray:
        self.calls["pinned"] += 1
        return np.zeros(nbytes, np.uint8)

    def upload(self, address: int, source: np.ndarray) -> None:
        self.calls["upload"] += 1
        self.copied["upload"] += source.nbytes

    def download(self, target: np.ndarray, address: int) -> None:
        self.calls["download"] += 1
        self.copied["download"] += target.nbytes
        target[:] = 0  # it may be a call's memory that held something else before

    def zero(self, address: int, nbytes: int) -> None:
        self.calls["zero"] += 1

    def function(self, source: str, name: str, defines: Mapping[str, object]) -> Any:
        module = holding(source, name, defines)
        self.calls["load"] += module not in self._loaded
        self._loaded.add(module)
        return name

    def resident(self, function: Any, threads: int) -> int:
        return _RESIDENT

    def launch(self, function: Any, blocks: int, threads: int, parameters: np.ndarray) -> None:
        self.calls["launch"] += 1

    def synchronize(self) -> None:
        self.calls["synchronize"] += 1

    def reaches(self, address: int) -> bool:
        return True

    def mark(self, stream: int) -> Any:
        self.calls["wait" if stream == self.stream else "event"] += 1
        return stream

    def reached(self, event: Any) -> bool:
        return True

    def follow(self, event: Any) -> None:
        self.calls["follow"] += 1


class NullWorld(World):
    """Ranks whose messages stay on the device: of those only the headers, which hold here, are delivered."""

    def _deliver(self, source: int, destination: int, target: np.ndarray, message: np.ndarray) -> None:
        if not (is_mirror(target) and is_mirror(message)):
            super()._deliver(source, destination, target, message)
            return
        for (mine, _), (theirs, _) in zip(target.host_parts(), message.host_parts(), strict=True):
            mine[:] = theirs


class NullTransport(InProcessTransport):
    """One of them."""

    checksums = False

    def allocator(self, device: devices.Device) -> Allocator:
        driver = device.driver
        assert driver is not None, "all ranks are on the device"
        return lambda nbytes, headers: mirror(driver, nbytes, headers)


@contextmanager
def null_device() -> Iterator[devices.Device]:
    """A device that runs the kernels of all tables, on a driver that does nothing."""
    before, bodies._routed = bodies._routed, bodies._Routed()
    try:
        yield devices.on("null", NullDriver())
    finally:
        bodies._routed = before
