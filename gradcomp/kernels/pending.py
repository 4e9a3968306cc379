"""Kernel calls that have been started and whose results are not here yet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class Pending(Protocol):
    """A call under way. Until it is finished its arrays must stay as they are.

    ``kernels``: where what belongs to the call runs; None: wherever its arguments lie.
    """

    kernels: Any

    def done(self) -> bool:
        """Whether :meth:`finish` would not wait. Never blocks; DeviceError if the device has failed."""
        ...

    def finish(self) -> None:
        """Put the results into the caller's arrays; waits for the device if need be. Once is enough."""
        ...


class Again:
    """What a device remembers of a call that comes again with the same arrays; nothing on the host.

    Between two times only the contents of the arrays change, of tables only the columns of addresses.
    """

    __slots__ = ("arrays", "device", "prepared", "runs")

    def __init__(self) -> None:
        self.device: Any = None  # its kernels
        self.runs: list[Any] = []
        self.prepared: Any = None
        self.arrays: Sequence[Any] = ()


class _Done:
    """A call of the host: complete when it returns."""

    kernels: Any = None

    def done(self) -> bool:
        return True

    def finish(self) -> None:
        return


DONE: Pending = _Done()
