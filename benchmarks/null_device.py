"""A device that does nothing but count, and ranks of one process whose messages stay on it, if their size is fixed.

What is left of a step is the program itself: its Python, and the host's copies of tables, flags and headers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from gradcomp.kernels import devices
from gradcomp.kernels.cuda.mirrors import is_mirror, mirror
from gradcomp.kernels.cuda.modules import Module, holding
from gradcomp.transport.base import Allocator
from gradcomp.transport.inprocess import InProcessTransport, World

_FIRST_ADDRESS = 1 << 44
_RESIDENT = 3 * 132  # blocks; three on each processor of an H100

# The kernel that tells how many elements are selected, and where its parameters have what it needs: see keys.cuh.
TELLS = "scan"
ROW_COUNT, WANTED, FOUND = 2, 6, 20
_LOOKED_AT = 1 << 13  # bytes that come back: flags and counts are in front, payloads behind
_PERIOD = 1009  # selections, until their counts come again where they vary


class Block:
    """Memory that is not there."""

    def __init__(self, address: int) -> None:
        self.address = address


class NullDriver:
    """See :class:`gradcomp.kernels.cuda.driver.Driver`. ``calls`` counts by kind, ``copied`` bytes by direction.

    Selections find as many elements as are wanted; if they are ``varying``, fewer, and another number each time.
    """

    stream = 1 << 20

    def __init__(self, *, varying: bool = False) -> None:
        self._varying = varying
        self._selections = 0
        self._uploaded: tuple[int, np.ndarray] = 0, np.zeros(0, np.uint8)
        self._found: dict[int, np.ndarray] = {}  # by where it comes back from
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
        self._uploaded = address, source

    def download(self, target: np.ndarray, address: int) -> None:
        self.calls["download"] += 1
        self.copied["download"] += target.nbytes
        target[:_LOOKED_AT] = 0  # it may be a call's memory that held something else before
        for place, counts in self._found.items():
            if address <= place < address + target.nbytes:
                target[place - address :][: counts.nbytes] = counts.view(np.uint8)
        self._found.clear()

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
        if function == TELLS:
            self._select(parameters.view(np.uint64))

    def _select(self, words: np.ndarray) -> None:
        place, (address, source) = int(words[FOUND]), self._uploaded
        if not place:
            return
        wanted = source[int(words[WANTED]) - address :][: 8 * int(words[ROW_COUNT])].view(np.int64)
        self._selections += 1
        fewer = self._selections % _PERIOD if self._varying else 0
        self._found[place] = wanted - np.minimum(fewer, wanted // 2)

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
def null_device(*, varying: bool = False) -> Iterator[devices.Device]:
    """A device that runs the kernels of all tables, on a driver that does nothing."""
    yield devices.on("null", NullDriver(varying=varying))
