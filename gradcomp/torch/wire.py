"""Converts tensors to the arrays that collectives take, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gradcomp.job.arithmetic import dtype_of
from gradcomp.job.collectives import Descriptor, check_free
from gradcomp.job.process_sets import Members, members
from gradcomp.job.reduce_op import ScaledOp
from gradcomp.torch.tensors import dense_problem, dtype_name

Array = npt.NDArray[Any]

#: Dtypes that can be reduced.
REDUCIBLE = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.int8, torch.int16, torch.int32, torch.int64),
)


def host(tensor: torch.Tensor, copy: bool) -> torch.Tensor:
    """Return the values as a flat tensor in host memory.

    It is the tensor's own memory if that is contiguous on the host and ``copy`` is false.
    """
    flat = tensor.detach()
    if not flat.is_cpu or flat.is_conj() or flat.is_neg():
        flat = flat.cpu().resolve_conj().resolve_neg()
    flat = flat.contiguous().view(-1)
    return flat.clone() if copy and shares_memory(flat, tensor) else flat


def shares_memory(flat: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Return True if writing to ``flat`` writes to ``tensor``."""
    return tensor.device.type == "cpu" and flat.data_ptr() == tensor.data_ptr()


def array_of(flat: torch.Tensor) -> Array:
    """View the memory as an array of the same dtype."""
    if flat.dtype is torch.bfloat16:
        return flat.view(torch.int16).numpy().view(dtype_of("bfloat16"))
    array: Array = flat.numpy()
    return array


def bytes_view(flat: torch.Tensor) -> npt.NDArray[np.uint8]:
    if len(flat) == 0:  # an empty tensor may have a stride that torch cannot view as another dtype
        return np.empty(0, np.uint8)
    array: npt.NDArray[np.uint8] = flat.view(torch.uint8).numpy()
    return array


def tensor_of(values: Array, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """Return bytes, or values of the dtype of ``like``, as a tensor of that dtype, on its device."""
    if values.size == 0:  # an empty array may have a stride that torch cannot view as another dtype
        return torch.empty(tuple(shape), dtype=like.dtype, device=like.device)
    flat = torch.from_numpy(values.view(np.uint8)).view(like.dtype)
    return flat.view(tuple(shape)).to(like.device)


def descriptors(
    kind: str,
    tensors: Any,
    name: str | None,
    process_set: Members,
    how: ScaledOp | None = None,
    *,
    root: int | None = None,
    problem: str | None = None,
) -> tuple[list[Descriptor], str | None]:
    """Return descriptors of the call on one or more tensors, and the reason why it is impossible, or None.

    Raises ConfigError for a name whose last call has not ended.
    """
    ranks = members(process_set)
    check_free(kind, ranks, name)
    if isinstance(tensors, torch.Tensor) or not isinstance(tensors, Sequence):
        wrong: str | None = f"not a list of tensors but {type(tensors).__name__}"
    else:
        wrong = None if len(tensors) else "an empty list of tensors"
        dtypes = None if how is None else REDUCIBLE
        for place, tensor in enumerate(tensors):
            if wrong is None and (told := dense_problem(tensor, dtypes)):
                wrong = told if len(tensors) == 1 else f"tensor {place}: {told}"
    problem = problem or wrong
    if problem is not None:
        return [Descriptor(kind, ranks, name)], problem
    forms = [(dtype_name(each.dtype), each.element_size(), tuple(each.shape)) for each in tensors]
    return [Descriptor(kind, ranks, name, *form, how, root) for form in forms], None
