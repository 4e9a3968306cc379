"""Collectives on groups of tensors, started without autograd; the public functions document each of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from gradcomp.job import collectives, runtime
from gradcomp.job.process_sets import Members, root_of
from gradcomp.job.reduce_op import ScaledOp
from gradcomp.job.reducing import shares
from gradcomp.torch.handles import Handle
from gradcomp.torch.wire import array_of, bytes_view, descriptors, host, shares_memory, tensor_of

Tensors = Sequence[torch.Tensor]


def begin_allreduce(
    tensors: Tensors,
    name: str | None,
    how: ScaledOp,
    problem: str | None,
    process_set: Members,
    *,
    in_place: bool = False,
) -> Handle:
    """Start a group's allreduce, in the tensors' own memory where that is dense, on the host and ``in_place``."""
    called, problem = descriptors("allreduce", tensors, name, process_set, how, problem=problem)
    flats = [] if problem else [host(tensor, copy=not in_place) for tensor in tensors]

    def finish(_: None) -> list[torch.Tensor]:
        results: list[torch.Tensor] = []
        for tensor, flat in zip(tensors, flats, strict=True):
            if not in_place:
                results.append(flat.view(tensor.shape).to(tensor.device))
            elif shares_memory(flat, tensor):
                torch.autograd.graph.increment_version(tensor)
                results.append(tensor)
            else:
                results.append(tensor.copy_(flat.view(tensor.shape)))
        return results

    return Handle(collectives.allreduce(called, [array_of(flat) for flat in flats], problem), finish)


def begin_reducescatter(
    tensors: Tensors, name: str | None, how: ScaledOp, problem: str | None, process_set: Members
) -> Handle:
    called, problem = descriptors("reducescatter", tensors, name, process_set, how, problem=problem)
    flats = [] if problem else [host(tensor, copy=False) for tensor in tensors]
    ranks = called[0].ranks
    place = ranks.index(runtime.rank())

    def finish(parts: list[Any]) -> list[torch.Tensor]:
        return [
            tensor_of(part, (shares(len(tensor), len(ranks))[place], *tensor.shape[1:]), tensor)
            for part, tensor in zip(parts, tensors, strict=True)
        ]

    return Handle(collectives.reducescatter(called, [array_of(flat) for flat in flats], problem), finish)


def begin_allgather(
    tensors: Tensors, name: str | None, process_set: Members, starts: list[int] | None = None
) -> Handle:
    """Start a group's allgather; appends to ``starts`` the row at which this rank's part of each result begins."""
    called, problem = descriptors("allgather", tensors, name, process_set)
    flats = [] if problem else [host(tensor, copy=False) for tensor in tensors]

    def finish(parts: list[tuple[Any, list[int]]]) -> list[torch.Tensor]:
        ranks = called[0].ranks
        among_one, place = len(ranks) == 1, ranks.index(runtime.rank())
        if starts is not None:
            starts.extend(sum(rows[:place]) for _, rows in parts)
        return [
            tensor_of(whole.copy() if among_one else whole, (sum(rows), *tensor.shape[1:]), tensor)
            for (whole, rows), tensor in zip(parts, tensors, strict=True)
        ]

    return Handle(collectives.allgather(called, [bytes_view(flat) for flat in flats], problem), finish)


def begin_broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None, process_set: Members, *, in_place: bool = False
) -> Handle:
    """Start a broadcast, into the tensor's own memory where that is dense, on the host and ``in_place``."""
    _, problem = root_of(root_rank, process_set)
    called, problem = descriptors("broadcast", [tensor], name, process_set, root=root_rank, problem=problem)
    flat = torch.empty(0, dtype=torch.uint8) if problem else host(tensor, copy=not in_place)

    def finish(_: None) -> torch.Tensor:
        if not in_place:
            return flat.view(tensor.shape).to(tensor.device)
        if shares_memory(flat, tensor):
            torch.autograd.graph.increment_version(tensor)
            return tensor
        return tensor.copy_(flat.view(tensor.shape))

    return Handle(collectives.broadcast(called[0], bytes_view(flat), problem), finish)


def begin_alltoall(tensor: torch.Tensor, splits: Any, name: str | None, process_set: Members) -> Handle:
    """Start an all-to-all, whose result is the received rows and the number of rows from each rank (int32)."""
    (called, *_), problem = descriptors("alltoall", [tensor], name, process_set)
    flat = torch.empty(0, dtype=torch.uint8) if problem else host(tensor, copy=False)
    counts, wrong = _counts(splits)
    parts: list[int] = []
    if problem is None and wrong is None:
        parts, wrong = collectives.splits_of(called, counts)

    def finish(result: tuple[Any, list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        whole, received = result
        among_one = len(called.ranks) == 1
        rows = tensor_of(whole.copy() if among_one else whole, (sum(received), *tensor.shape[1:]), tensor)
        return rows, torch.tensor(received, dtype=torch.int32)

    return Handle(collectives.alltoall(called, bytes_view(flat), parts, problem or wrong), finish)


def _counts(splits: Any) -> tuple[Any, str | None]:
    """Return the splits as an array of integers, or None and the problem with them."""
    if splits is None:
        return None, None
    try:
        counts = np.asarray(splits.detach().cpu() if isinstance(splits, torch.Tensor) else splits)
    except (ValueError, TypeError):
        return None, "splits must be integers"
    return (
        (counts, None)
        if counts.dtype.kind in "iu"
        else (None, f"splits must be integers, got {counts.dtype}")
    )
