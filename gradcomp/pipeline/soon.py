"""Numbers that an exchange needs and that a device has yet to tell."""

from __future__ import annotations

from typing import Protocol


class Soon(Protocol):
    """A number that is not here yet."""

    def done(self) -> bool:
        """Whether it has come; does not wait. May raise a :class:`gradcomp.GradcompError`."""
        ...

    def result(self) -> float:
        """The number, once it is done."""
        ...


Number = float | Soon
