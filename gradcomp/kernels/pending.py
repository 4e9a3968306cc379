"""Kernel calls that have been started and whose results are not here yet."""

from __future__ import annotations

from typing import Protocol


class Pending(Protocol):
    """A call under way. Until it is finished its arrays must stay as they are."""

    def done(self) -> bool:
        """Whether :meth:`finish` would not wait. Never blocks; DeviceError if the device has failed."""
        ...

    def finish(self) -> None:
        """Put the results into the caller's arrays; waits for the device if need be. Once is enough."""
        ...


class _Done:
    """A call of the host: complete when it returns."""

    def done(self) -> bool:
        return True

    def finish(self) -> None:
        return


DONE: Pending = _Done()
