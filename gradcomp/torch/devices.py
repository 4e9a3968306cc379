"""Which device a model's gradients are on."""

from __future__ import annotations

import torch

from gradcomp.core.errors import ConfigError
from gradcomp.kernels import devices
from gradcomp.kernels.devices import HOST, Device
from gradcomp.torch import pool
from gradcomp.torch.layers import Named


def device_of(named: Named) -> Device:
    """The one device of all parameters, the host if there are none; ConfigError if it is not one or cannot be used."""
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
            f"gradients on {found[0]} cannot be exchanged: on the CPU and on CUDA devices they can"
        )
    index = torch.cuda.current_device() if device.index is None else device.index
    pool.lend(index)
    return devices.cuda(index)


def stream_of(tensor: torch.Tensor) -> int:
    """The handle of the stream that works on the tensor's device now; 0 on the CPU."""
    return int(torch.cuda.current_stream(tensor.device).cuda_stream) if tensor.is_cuda else 0
