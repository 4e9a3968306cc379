"""Finds the device on which a model's gradients are exchanged, and lends its kernels PyTorch's memory."""

from __future__ import annotations

import logging
import weakref
from functools import cache

import torch

from gradcomp.core.errors import ConfigError
from gradcomp.kernels import devices
from gradcomp.kernels.cuda import driver
from gradcomp.kernels.devices import HOST, Device
from gradcomp.torch.layers import Named
from gradcomp.torch.streams import staged

logger = logging.getLogger("gradcomp")


class _Lent:
    """A block that goes back to the allocator with the last reference to it."""

    def __init__(self, address: int) -> None:
        self.address = address
        # PyTorch frees everything itself at exit.
        weakref.finalize(self, torch.cuda.caching_allocator_delete, address).atexit = False


class TorchPool:
    """Implements :class:`gradcomp.kernels.cuda.driver.Pool` by PyTorch's allocator."""

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
    driver.lend(index, TorchPool(index))


def device_of(named: Named) -> Device:
    """Return the one device of all parameters, or the host if there are none.

    Where CuPy is missing, gradients of a GPU are exchanged in the host's memory, and a warning says so.
    Raises ConfigError for several devices, and for one that is neither the CPU nor a CUDA device.
    """
    found = sorted({str(parameter.device) for _, parameter in named})
    if not found or found == ["cpu"]:
        return HOST
    if len(found) > 1:
        raise ConfigError(
            f"the optimizer's parameters are on {', '.join(found)}; one optimizer exchanges gradients of one device"
        )
    device = torch.device(found[0])
    if device.type != "cuda":
        raise ConfigError(
            f"gradients on {found[0]} cannot be exchanged: move the model to the CPU or to a CUDA device"
        )
    index = torch.cuda.current_device() if device.index is None else device.index
    try:
        lend(index)
        return devices.cuda(index)
    except ConfigError as error:
        if not isinstance(error.__cause__, ImportError):
            raise
        _warn(
            f"{error}; until then they are copied to pinned memory and exchanged by the CPU's kernels: slower, "
            "with the same means"
        )
        return staged(torch.device("cuda", index))


@cache
def _warn(text: str) -> None:
    """Warn once for each text, however many optimizers there are."""
    logger.warning("%s", text)
