"""Finds the device on which a model's gradients are exchanged."""

from __future__ import annotations

import logging
from functools import cache

import torch

from gradcomp.core.errors import ConfigError
from gradcomp.kernels import devices
from gradcomp.kernels.devices import HOST, Device
from gradcomp.torch import pool
from gradcomp.torch.layers import Named
from gradcomp.torch.staging import staged

logger = logging.getLogger("gradcomp")


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
        pool.lend(index)
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
