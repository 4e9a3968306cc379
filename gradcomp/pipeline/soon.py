"""An exchange may need numbers that a device is still computing."""

from __future__ import annotations

from typing import Protocol


class Soon(Protocol):
    """Stands for a number that a device may still be computing."""

    def done(self) -> bool:
        """Return whether it has come, without waiting; may raise a :class:`gradcomp.GradcompError`."""
        ...

    def result(self) -> float:
        """Return the number, once it is done."""
        ...


Number = float | Soon
