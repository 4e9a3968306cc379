"""Tensors: the properties that decide whether and how they can be exchanged, and compression state made of them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gradcomp.exchange.checkpoint_manager import checkpoint_manager_of
from gradcomp.job.checkpoint import from_plain, to_plain
from gradcomp.job.report import Readers


def dense_problem(tensor: Any, dtypes: Iterable[torch.dtype] | None = None) -> str | None:
    """Return why this is not a tensor whose values can be exchanged, or None if it is.

    ``dtypes`` lists the dtypes that are allowed, if not all are.
    """
    if not isinstance(tensor, torch.Tensor):
        return f"not a tensor but {type(tensor).__name__}"
    if torch.nn.parameter.is_lazy(tensor):
        return "a lazy parameter has no values yet; run one forward pass first"
    if not has_memory(tensor):
        if is_dtensor(tensor):
            return "a DTensor, of which each rank may hold a part; use its to_local() or full_tensor()"
        return f"a {type(tensor).__name__}, whose values are not in its own memory; use a plain torch.Tensor"
    if tensor.device.type == "meta":
        return "on the meta device, without values; give it some first, with to_empty() and an initialisation"
    if tensor.is_nested:
        return "a nested tensor; use torch.nested.to_padded_tensor() or its buffer"
    if tensor.layout is not torch.strided or tensor.is_quantized:
        kind = "quantised" if tensor.is_quantized else tensor.layout
        return f"not a dense tensor with plain values ({kind}); use to_dense() if it is sparse"
    if dtypes is not None and tensor.dtype not in dtypes:
        return f"{tensor.dtype} cannot be reduced"
    return None


def has_memory(tensor: torch.Tensor) -> bool:
    """Return True if the values are in the tensor's own memory, and not in tensors that its class wraps."""
    kind = type(tensor)
    return kind is torch.Tensor or kind.__torch_dispatch__ is torch._C._disabled_torch_dispatch_impl


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Return True for a DTensor, without importing its package, which takes long."""
    return not has_memory(tensor) and any(kind.__name__ == "DTensor" for kind in type(tensor).__mro__)


@dataclass(frozen=True)
class Form:
    """The dtype, shape and device of a layer's gradient, as the ranks agreed, and its layout in memory.

    A gradient with these ``strides``, those of a dense tensor, can be exchanged without a copy.
    """

    dtype: torch.dtype
    shape: torch.Size
    device: torch.device
    strides: tuple[int, ...]

    @classmethod
    def of(cls, parameter: torch.Tensor) -> Form:
        """Return the form of a parameter's gradients."""
        dense = torch.empty_like(parameter, device="meta")
        return cls(parameter.dtype, parameter.shape, parameter.device, dense.stride())

    def fits(self, tensor: torch.Tensor) -> bool:
        """Return True if the tensor has this form, apart from its strides; it may be sparse."""
        return (
            (type(tensor) is torch.Tensor or has_memory(tensor))
            and tensor.dtype is self.dtype
            and tensor.shape == self.shape
            and tensor.device == self.device
            and (tensor.layout is torch.strided or tensor.is_sparse)
        )

    def empty(self) -> torch.Tensor:
        """Return memory that can be exchanged."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device)

    def __str__(self) -> str:
        return f"{dtype_name(self.dtype)} {list(self.shape)} on {self.device}"


def form(value: Any) -> str:
    """Return dtype and shape as text, such as "float32 [3, 4]", or "object" for anything but a tensor."""
    return f"{dtype_name(value.dtype)} {list(value.shape)}" if isinstance(value, torch.Tensor) else "object"


def dtype_name(dtype: torch.dtype) -> str:
    """Return the dtype's name without its module."""
    return str(dtype).removeprefix("torch.")


def culprit(error: Exception, obj: Any) -> str:
    """Name the part of an object that can be neither saved nor loaded, from the error that torch raised."""
    found = re.search(r"GLOBAL (\S+)", str(error))
    return found[1] if found else f"{type(obj).__name__}: {str(error).partition(chr(10))[0]}"


class CompressionState(Readers):
    """Gives users the compression state in the form that ``torch.save`` and ``torch.load(weights_only=True)`` take."""

    def compression_state(self) -> dict[str, Any]:
        """Return this rank's residuals by layer name, its step, plan and bucket order, as copies.

        All values are tensors, numbers and strings, so ``torch.load(weights_only=True)`` reads what
        ``torch.save`` makes of them. Local. Raises StateError while a step is open, or during a backward pass.
        """
        state: dict[str, Any] = tensors(to_plain(checkpoint_manager_of(self).snapshot()))
        return state

    def load_compression_state(self, state: dict[str, Any]) -> None:
        """Resume from the result of :meth:`compression_state` on this rank, of a job with the same number of ranks.

        All ranks must load states that were taken after the same step. Local. Raises StateError and changes
        nothing if a step is open or anything does not fit; the error lists all of it.
        """
        checkpoint_manager_of(self).restore(from_plain(arrays(state)))


def tensors(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: tensors(item) for key, item in value.items()}
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value


def arrays(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: arrays(item) for key, item in value.items()}
    return value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else value
