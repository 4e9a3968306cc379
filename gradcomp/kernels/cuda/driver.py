"""The protocol of a GPU as kernels use it: memory, copies, functions and launches, all on one stream of its own.

A framework may lend its allocator, which holds on to unused memory that a second pool could not get.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

_lent: dict[int, Pool] = {}


class Block(Protocol):
    """Memory on the device, aligned to 256 bytes and freed with the object."""

    @property
    def address(self) -> int:
        """Returns the address of the first byte."""
        ...


class Driver(Protocol):
    """One device and one stream on it, as :mod:`gradcomp.kernels.cuda.over_cuda` implements it.

    Only kernels and copies access the device's memory. All calls raise DeviceError, with the device's own text, if it
    has failed.
    """

    @property
    def stream(self) -> int:
        """Returns the handle of the stream."""
        ...

    def make_current(self) -> None:
        """Makes this device the calling thread's current one, so that the thread creates no context on another."""
        ...

    def allocate(self, nbytes: int) -> Block:
        """Returns memory of undefined content from a pool; it may be freed while kernels still use it.

        DeviceError if the device is out of memory.
        """
        ...

    def pinned(self, nbytes: int) -> Bytes:
        """Returns host memory of undefined content, for copies that do not wait."""
        ...

    def upload(self, address: int, source: Bytes) -> None:
        """Starts a copy to the device; ``source`` is pinned, and must not change until :meth:`synchronize`."""
        ...

    def download(self, target: Bytes, address: int) -> None:
        """Starts a copy from the device; ``target`` is pinned, and contains the bytes after :meth:`synchronize`."""
        ...

    def zero(self, address: int, nbytes: int) -> None:
        """Starts to set bytes to zero."""
        ...

    def function(self, source: str, name: str, defines: Mapping[str, object]) -> Any:
        """Returns a kernel of a source file, compiled at its first use."""
        ...

    def resident(self, function: Any, threads: int) -> int:
        """Returns the number of a kernel's blocks that the device runs at a time, at least one."""
        ...

    def launch(self, function: Any, blocks: int, threads: int, parameters: Bytes) -> None:
        """Starts a kernel with one argument, the struct of its parameters, which are copied before this returns."""
        ...

    def synchronize(self) -> None:
        """Waits for all started work."""
        ...

    def reaches(self, address: int) -> bool:
        """Returns whether kernels can use memory at this address."""
        ...

    def mark(self, stream: int) -> Any:
        """Returns an event recorded after the present work of a framework's stream; ``stream`` is its handle.

        StateError while the stream is captured into a graph, as its work does not run then.
        """
        ...

    def reached(self, event: Any) -> bool:
        """Returns whether an event has completed; DeviceError if it never will."""
        ...

    def follow(self, event: Any) -> None:
        """Makes all work that is started from now on wait for the event."""
        ...


class Pool(Protocol):
    """A framework's allocator on one device."""

    def allocate(self, nbytes: int, stream: int) -> Block:
        """Returns memory for a stream, freed with the object for reuse on that stream; MemoryError if none is left."""
        ...

    def release(self) -> None:
        """Returns the memory that is not in use to the device."""
        ...

    def describe(self) -> str:
        """Names the pool's owner, and the bytes that it holds."""
        ...


def lend(index: int, pool: Pool) -> None:
    """Makes drivers of the device with this number allocate from the pool."""
    _lent[index] = pool


def lent_to(index: int) -> Pool | None:
    """Returns the pool of the device with this number; None if no framework lent one."""
    return _lent.get(index)
