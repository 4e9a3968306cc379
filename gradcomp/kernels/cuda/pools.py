"""Memory that a framework lends: its allocator keeps what it does not use, so a second pool beside it starves."""

from __future__ import annotations

from typing import Protocol

from gradcomp.kernels.cuda.driver import Block


class Pool(Protocol):
    """A framework's allocator on one device."""

    def allocate(self, nbytes: int, stream: int) -> Block:
        """Memory for a stream; freed with the object, for the same stream to use again. MemoryError if it is full."""
        ...

    def release(self) -> None:
        """Give back to the device what is kept and not in use."""
        ...

    def describe(self) -> str:
        """Whose it is, and how many bytes it holds."""
        ...


_lent: dict[int, Pool] = {}


def lend(index: int, pool: Pool) -> None:
    """From now on drivers of the device with this number allocate from the pool."""
    _lent[index] = pool


def lent(index: int) -> Pool | None:
    """The pool of the device with this number; None if no framework lent one."""
    return _lent.get(index)
