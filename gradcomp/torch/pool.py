"""PyTorch's caching allocator, lent to the kernels of a GPU."""

from __future__ import annotations

import weakref

import torch

from gradcomp.kernels.cuda import pools


class _Lent:
    """Goes back to the allocator with the last reference."""

    def __init__(self, address: int) -> None:
        self.address = address
        # At exit PyTorch frees everything by itself.
        weakref.finalize(self, torch.cuda.caching_allocator_delete, address).atexit = False


class TorchPool:
    """See :class:`gradcomp.kernels.cuda.pools.Pool`."""

    def __init__(self, index: int) -> None:
        self._index = index

    def allocate(self, nbytes: int, stream: int) -> _Lent:
        """From the blocks that the allocator keeps for this stream."""
        try:
            return _Lent(int(torch.cuda.caching_allocator_alloc(max(nbytes, 1), self._index, stream)))
        except torch.cuda.OutOfMemoryError as error:
            raise MemoryError(str(error)) from error

    def release(self) -> None:
        """Empty the cache."""
        torch.cuda.empty_cache()

    def describe(self) -> str:
        """By PyTorch's own counters."""
        held, used = torch.cuda.memory_reserved(self._index), torch.cuda.memory_allocated(self._index)
        return f"PyTorch's allocator holds {held} bytes, {used} of them in use"


def lend(index: int) -> None:
    """Let the kernels of a GPU take memory from PyTorch's allocator."""
    pools.lend(index, TorchPool(index))
