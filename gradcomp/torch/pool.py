"""Gives the kernels of a GPU memory from PyTorch's caching allocator."""

from __future__ import annotations

import weakref

import torch

from gradcomp.kernels.cuda import pools


class _Lent:
    """A block that goes back to the allocator with the last reference to it."""

    def __init__(self, address: int) -> None:
        self.address = address
        # PyTorch frees everything itself at exit.
        weakref.finalize(self, torch.cuda.caching_allocator_delete, address).atexit = False


class TorchPool:
    """Implements :class:`gradcomp.kernels.cuda.pools.Pool` by PyTorch's allocator."""

    def __init__(self, index: int) -> None:
        self._index = index

    def allocate(self, nbytes: int, stream: int) -> _Lent:
        """Allocate from the blocks that PyTorch keeps for this stream."""
        try:
            return _Lent(int(torch.cuda.caching_allocator_alloc(max(nbytes, 1), self._index, stream)))
        except torch.cuda.OutOfMemoryError as error:
            raise MemoryError(str(error)) from error

    def release(self) -> None:
        torch.cuda.empty_cache()

    def describe(self) -> str:
        held, used = torch.cuda.memory_reserved(self._index), torch.cuda.memory_allocated(self._index)
        return f"PyTorch's allocator holds {held} bytes, {used} of them in use"


def lend(index: int) -> None:
    """Let the kernels of GPU ``index`` take memory from PyTorch's allocator."""
    pools.lend(index, TorchPool(index))
