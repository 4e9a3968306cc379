"""The protocol of kernel calls that have been started and whose results are not there yet."""

from __future__ import annotations

from typing import Protocol


class Pending(Protocol):
    """A call in progress. Its arrays must not change until it is finished."""

    def done(self) -> bool:
        """Tells, without blocking, whether :meth:`finish` would not wait; DeviceError if the device has failed."""
        ...

    def finish(self) -> None:
        """Puts the results into the caller's arrays, after waiting for the device if necessary. Call it once."""
        ...


class _Done:
    """A call of the host: complete when it returns."""

    def done(self) -> bool:
        return True

    def finish(self) -> None:
        return


DONE: Pending = _Done()
