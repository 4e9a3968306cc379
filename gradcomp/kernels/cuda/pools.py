"""Memory that a framework lends: its allocator holds on to unused memory, which a second pool could not get."""

from __future__ import annotations

from typing import Protocol

from gradcomp.kernels.cuda.driver import Block


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


_lent: dict[int, Pool] = {}


def lend(index: int, pool: Pool) -> None:
    """Makes drivers of the device with this number allocate from the pool."""
    _lent[index] = pool


def lent(index: int) -> Pool | None:
    """Returns the pool of the device with this number; None if no framework lent one."""
    return _lent.get(index)
