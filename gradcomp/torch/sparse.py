"""Converts torch's sparse embedding gradients to rows and back."""

from __future__ import annotations

import torch

from gradcomp.core.errors import StateError
from gradcomp.job.sparse import Array, Rows


def rows_of(name: str, gradient: torch.Tensor) -> tuple[Array, Array]:
    """Return the indices and values of the rows of a layer's sparse gradient, on the host, in the wire's dtype."""
    gradient = gradient.coalesce()
    if gradient.sparse_dim() != 1:
        raise StateError(f"layer {name!r}: sparse gradients must be sparse in their rows only")
    wire = torch.float64 if gradient.dtype == torch.float64 else torch.float32
    return gradient.indices()[0].cpu().numpy(), gradient.values().to("cpu", wire).contiguous().numpy()


def tensor_of(rows: Rows, like: torch.Tensor) -> torch.Tensor:
    """Return the sparse tensor with these rows, and with the shape, dtype and device of ``like``."""
    index, values = (torch.from_numpy(array).to(like.device) for array in rows)
    return torch.sparse_coo_tensor(index[None], values.to(like.dtype), like.shape, is_coalesced=True)
