"""Sparse embedding gradients of torch, by their rows."""

from __future__ import annotations

import torch

from gradcomp.core.errors import StateError
from gradcomp.engine import Exchanger
from gradcomp.job import sparse


def mean_of_rows(
    exchanger: Exchanger, name: str, like: torch.Tensor, gradient: torch.Tensor | None, divisor: float
) -> torch.Tensor | None:
    """The sum over ranks of a row-sparse gradient, divided by ``divisor``; None if no rank has one.

    ``like`` has the gradient's shape and dtype; ``gradient`` is this rank's, or None. Collective, rounds and wire: see
    :func:`gradcomp.job.sparse.mean_of_rows`.
    """
    wire = torch.float64 if like.dtype == torch.float64 else torch.float32
    rows = None
    if gradient is not None:
        gradient = gradient.coalesce()
        if gradient.sparse_dim() != 1:
            raise StateError(f"layer {name!r}: sparse gradients must be sparse in their rows only")
        rows = gradient.indices()[0].cpu().numpy(), gradient.values().to("cpu", wire).contiguous().numpy()
    dtype = torch.empty(0, dtype=wire).numpy().dtype
    found = sparse.mean_of_rows(exchanger, name, tuple(like.shape), dtype, rows, divisor)
    if found is None:
        return None
    index, mean = (torch.from_numpy(array).to(like.device) for array in found)
    return torch.sparse_coo_tensor(index[None], mean.to(like.dtype), like.shape, is_coalesced=True)
