"""What the kernels need of a GPU: memory, copies, functions and their launches, all on one stream of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


class Block(Protocol):
    """Memory on the device, freed with the object; on a boundary of 256 bytes."""

    @property
    def address(self) -> int:
        """Address of the first byte."""
        ...


class Driver(Protocol):
    """One device and one stream on it. :mod:`gradcomp.kernels.cuda.over_cuda` is the real one.

    Memory of the device is reached by kernels and copies alone. All calls raise DeviceError, with the device's own
    text, if it has failed.
    """

    @property
    def stream(self) -> int:
        """The handle of its stream."""
        ...

    def make_current(self) -> None:
        """Let the calling thread work on this device from now on, so that it makes no context on another."""
        ...

    def allocate(self, nbytes: int) -> Block:
        """Memory of undefined content, from a pool; whoever frees it may do so while kernels still run.

        DeviceError if the device has no room for it.
        """
        ...

    def pinned(self, nbytes: int) -> Bytes:
        """Memory of the host, of undefined content, for copies that do not wait."""
        ...

    def upload(self, address: int, source: Bytes) -> None:
        """Copy to the device; ``source`` is pinned, and stays as it is until :meth:`synchronize`."""
        ...

    def download(self, target: Bytes, address: int) -> None:
        """Copy from the device; ``target`` is pinned, and holds the bytes after :meth:`synchronize`."""
        ...

    def zero(self, address: int, nbytes: int) -> None:
        """Set bytes to zero."""
        ...

    def function(self, source: str, name: str, defines: Mapping[str, object]) -> Any:
        """A kernel of a source file, compiled when it is first asked for."""
        ...

    def resident(self, function: Any, threads: int) -> int:
        """How many blocks of a kernel the device runs at a time, at least one."""
        ...

    def launch(self, function: Any, blocks: int, threads: int, parameters: Bytes) -> None:
        """Start a kernel with one argument, the struct of its parameters, which are copied before this returns."""
        ...

    def synchronize(self) -> None:
        """Wait for all that was started."""
        ...

    def reaches(self, address: int) -> bool:
        """Whether kernels can use memory at this address."""
        ...

    def mark(self, stream: int) -> Any:
        """An event behind what a framework's stream holds by now; ``stream`` is its handle.

        StateError while the stream is captured into a graph: what it holds does not run then.
        """
        ...

    def reached(self, event: Any) -> bool:
        """Whether an event is behind its stream by now; DeviceError if it will never be."""
        ...

    def follow(self, event: Any) -> None:
        """Nothing that is started from now on begins before the event."""
        ...
