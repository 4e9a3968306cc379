"""Sparse embedding gradients: gathered rows, added on every rank in rank order."""

from __future__ import annotations

import json

import numpy as np
import torch

from gradcomp.core.errors import StateError, WireFormatError
from gradcomp.transport.base import Transport, wait


def mean_of_rows(
    transport: Transport, name: str, like: torch.Tensor, gradient: torch.Tensor | None, divisor: float
) -> torch.Tensor | None:
    """The sum over ranks of a row-sparse gradient, divided by ``divisor``; None if no rank has one.

    ``like`` has the gradient's shape and dtype; ``gradient`` is this rank's, or None.

    Coalesced on each rank first. The ranks send their rows, or all of the tensor if that is fewer bytes. Collective,
    blocking. Rounds: 2 of a few bytes (who has how much), then 2 for rows or 1 for everything. Wire per rank:
    (N-1) (8 + 4 row elements) bytes per row, or 2 d (N-1)/N.
    """
    if gradient is not None:
        gradient = gradient.coalesce()
        if gradient.sparse_dim() != 1:
            raise StateError(f"layer {name!r}: sparse gradients must be sparse in their rows only")
    rows = 0 if gradient is None else int(gradient.indices().shape[1])
    row_elements = like[0].numel() if like.shape[0] else 0
    counts = [
        _count(part) for part in transport.allgather_bytes(json.dumps([rows, gradient is not None]).encode())
    ]
    if not any(has for _, has in counts):
        return None
    gathered_bytes = sum(n for n, _ in counts) * (8 + 4 * row_elements)
    dense_bytes = 2 * 4 * like.numel()
    if gathered_bytes > dense_bytes:
        return _dense(transport, like, gradient, divisor)
    return _rows(transport, like, gradient, divisor, row_elements)


def _count(part: bytes) -> tuple[int, bool]:
    try:
        rows, has = json.loads(part)
    except ValueError as error:
        raise WireFormatError(f"a count of sparse rows is malformed: {error}") from error
    return int(rows), bool(has)


def _dense(
    transport: Transport, like: torch.Tensor, gradient: torch.Tensor | None, divisor: float
) -> torch.Tensor:
    total = torch.zeros(like.shape) if gradient is None else gradient.to_dense().float().contiguous()
    wait(transport.allreduce(total.view(-1).numpy()))
    return (total / divisor).to(like.dtype).to_sparse(1).coalesce()


def _rows(
    transport: Transport, like: torch.Tensor, gradient: torch.Tensor | None, divisor: float, row_elements: int
) -> torch.Tensor:
    payload = b""
    if gradient is not None:
        index = gradient.indices()[0].numpy().astype("<i8")
        payload = index.tobytes() + gradient.values().float().contiguous().numpy().tobytes()
    row_bytes = 8 + 4 * row_elements
    indices, values = [], []
    for rank, part in enumerate(transport.allgather_bytes(payload)):
        count, rest = divmod(len(part), row_bytes)
        index = np.frombuffer(part, dtype="<i8", count=count)
        if rest or (count and (index.min() < 0 or index.max() >= like.shape[0])):
            raise WireFormatError(f"rank {rank} sent sparse rows outside the layer")
        indices.append(torch.from_numpy(index.copy()))
        data = np.frombuffer(part, dtype="<f4", offset=8 * count).copy()
        values.append(torch.from_numpy(data).reshape(count, *like.shape[1:]))
    # coalesce() adds duplicates in their order, which is the order of ranks: the same bits everywhere.
    total = torch.sparse_coo_tensor(
        torch.cat(indices)[None], (torch.cat(values) / divisor).to(like.dtype), like.shape
    )
    return total.coalesce()
