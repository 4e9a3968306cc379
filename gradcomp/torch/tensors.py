"""What the user's collectives ask about a tensor."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch


def dense_problem(tensor: Any, dtypes: Iterable[torch.dtype] | None = None) -> str | None:
    """Why this is not a tensor whose values can be exchanged; None if it is. ``dtypes``: those allowed, if not all."""
    if not isinstance(tensor, torch.Tensor):
        return f"not a tensor but {type(tensor).__name__}"
    if torch.nn.parameter.is_lazy(tensor):
        return "a lazy parameter has no values yet; run one forward pass first"
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        return f"not a dense tensor with values ({tensor.layout} on {tensor.device}); use to_dense() if it is sparse"
    if dtypes is not None and tensor.dtype not in dtypes:
        return f"{tensor.dtype} cannot be reduced"
    return None


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The values' bytes in host memory, flat."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)


def form(value: Any) -> str:
    """Dtype and shape, such as "float32 [3, 4]"; "object" for what is not a tensor."""
    return f"{dtype_name(value.dtype)} {list(value.shape)}" if isinstance(value, torch.Tensor) else "object"


def dtype_name(dtype: torch.dtype) -> str:
    """The dtype's name without its module."""
    return str(dtype).removeprefix("torch.")


def culprit(error: Exception, obj: Any) -> str:
    """What in an object is neither a tensor nor a plain value, by the error that saving or loading it has raised."""
    found = re.search(r"GLOBAL (\S+)", str(error))
    return found[1] if found else f"{type(obj).__name__}: {str(error).partition(chr(10))[0]}"
