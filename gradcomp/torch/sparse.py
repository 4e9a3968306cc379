"""Sparse embedding gradients: gathered rows, added on every rank in rank order."""

from __future__ import annotations

import json

import numpy as np
import torch

from gradcomp.core.errors import StateError, WireFormatError
from gradcomp.engine import Exchanger


def mean_of_rows(
    exchanger: Exchanger, name: str, like: torch.Tensor, gradient: torch.Tensor | None, divisor: float
) -> torch.Tensor | None:
    """The sum over ranks of a row-sparse gradient, divided by ``divisor``; None if no rank has one.

    ``like`` has the gradient's shape and dtype; ``gradient`` is this rank's, or None.

    Coalesced on each rank first. The ranks send their rows, or all of the tensor if that is fewer bytes. Values travel
    and are added in float32, those of float64 layers in float64. Collective, blocking. Rounds: 2 of a few bytes (who
    has how much), then 2 for rows or 1 for everything. Wire per rank: (N-1) (8 + 4 row elements) bytes per row, or
    2 d (N-1)/N.
    """
    if gradient is not None:
        gradient = gradient.coalesce()
        if gradient.sparse_dim() != 1:
            raise StateError(f"layer {name!r}: sparse gradients must be sparse in their rows only")
    rows = 0 if gradient is None else int(gradient.indices().shape[1])
    row_elements = like[0].numel() if like.shape[0] else 0
    counts = [
        _count(part) for part in exchanger.allgather_bytes(json.dumps([rows, gradient is not None]).encode())
    ]
    if not any(has for _, has in counts):
        return None
    wire = torch.float64 if like.dtype == torch.float64 else torch.float32
    gathered_bytes = sum(n for n, _ in counts) * (8 + wire.itemsize * row_elements)
    dense_bytes = 2 * wire.itemsize * like.numel()
    if gathered_bytes > dense_bytes:
        return _dense(exchanger, like, gradient, divisor, wire)
    return _rows(exchanger, like, gradient, divisor, wire)


def _count(part: bytes) -> tuple[int, bool]:
    try:
        rows, has = json.loads(part)
    except ValueError as error:
        raise WireFormatError(f"a count of sparse rows is malformed: {error}") from error
    return int(rows), bool(has)


def _dense(
    exchanger: Exchanger, like: torch.Tensor, gradient: torch.Tensor | None, divisor: float, wire: torch.dtype
) -> torch.Tensor:
    total = (torch.zeros(like.shape) if gradient is None else gradient.to_dense()).to(wire).contiguous()
    exchanger.allreduce(total.view(-1).numpy())
    return (total / divisor).to(like.dtype).to_sparse(1).coalesce()


def _rows(
    exchanger: Exchanger, like: torch.Tensor, gradient: torch.Tensor | None, divisor: float, wire: torch.dtype
) -> torch.Tensor:
    payload = b""
    if gradient is not None:
        index = gradient.indices()[0].numpy().astype("<i8")
        payload = index.tobytes() + gradient.values().to(wire).contiguous().numpy().tobytes()
    row_elements = like[0].numel() if like.shape[0] else 0
    indices, values = [], []
    for rank, part in enumerate(exchanger.allgather_bytes(payload)):
        count, rest = divmod(len(part), 8 + wire.itemsize * row_elements)
        index = np.frombuffer(part, dtype="<i8", count=count)
        if rest or (count and (index.min() < 0 or index.max() >= like.shape[0])):
            raise WireFormatError(f"rank {rank} sent sparse rows outside the layer")
        indices.append(torch.from_numpy(index.copy()))
        data = np.frombuffer(part, dtype=f"<f{wire.itemsize}", offset=8 * count).copy()
        values.append(torch.from_numpy(data).reshape(count, *like.shape[1:]))
    # coalesce() adds duplicates in their order, which is the order of ranks: the same bits everywhere.
    total = torch.sparse_coo_tensor(torch.cat(indices)[None], torch.cat(values), like.shape).coalesce()
    mean = (total.values() / divisor).to(like.dtype)
    return torch.sparse_coo_tensor(total.indices(), mean, like.shape, is_coalesced=True)
