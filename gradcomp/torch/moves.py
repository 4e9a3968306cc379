"""Collectives that move the user's own tensors between ranks and change no value, with Horovod's semantics.

:mod:`gradcomp.torch.reductions` describes what all calls share: the comparison, names, process sets and
errors. Tensors are dense and of any dtype, including complex ones. Results are new tensors on the same
device. d is the size of a tensor in bytes, N the number of ranks. Gradients are Horovod's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gradcomp.job import collectives
from gradcomp.job.process_sets import Members, members
from gradcomp.torch.begin import begin_allgather, begin_alltoall, begin_broadcast
from gradcomp.torch.differentiable import AllGather, AllToAll, Broadcast, needs_gradient
from gradcomp.torch.handles import Handle

Tensors = Sequence[torch.Tensor]


def allgather(tensor: torch.Tensor, name: str | None = None, process_set: Members = None) -> torch.Tensor:
    """Return every rank's ``tensor``, joined along the first dimension in rank order; differentiable.

    Tensors have at least one dimension; first dimensions may differ between ranks, the others may not. The
    gradient of a rank's part is the average over ranks of the gradients of its rows. Wire: one all-to-all,
    (N-1) d bytes per rank.
    """
    return grouped([tensor], name, process_set)[0]


def grouped_allgather(
    tensors: Tensors, name: str | None = None, process_set: Members = None
) -> list[torch.Tensor]:
    """Gather each tensor as :func:`allgather` does, all in one message; differentiable."""
    return grouped(tensors, name, process_set)


def allgather_async(tensor: torch.Tensor, name: str | None = None, process_set: Members = None) -> Handle:
    """Start an :func:`allgather`; not differentiable.

    ``tensor`` must not be written before :func:`synchronize` has returned.
    """
    return begin_allgather([tensor], name, process_set).one()


def grouped_allgather_async(tensors: Tensors, name: str | None = None, process_set: Members = None) -> Handle:
    """Start a :func:`grouped_allgather`; not differentiable.

    No tensor may be written before :func:`synchronize` has returned.
    """
    return begin_allgather(tensors, name, process_set)


def grouped(tensors: Tensors, name: str | None, process_set: Members) -> list[torch.Tensor]:
    if isinstance(tensors, Sequence) and needs_gradient(tensors):
        return list(AllGather.apply(name, process_set, *tensors))  # type: ignore[no-untyped-call]
    results: list[torch.Tensor] = begin_allgather(tensors, name, process_set).wait()
    return results


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: Members = None
) -> torch.Tensor:
    """Return ``root_rank``'s tensor on every rank, bit for bit; differentiable.

    Dtype and shape must be the same on all ranks. ``root_rank`` is a rank of the job, also if a process set
    takes part. The root's gradient is the average of all ranks', the others' is zero. Wire: d bytes to every
    rank but the root, along a binomial tree.
    """
    if needs_gradient([tensor]):
        return Broadcast.apply(tensor, root_rank, name, process_set)  # type: ignore[no-any-return, no-untyped-call]
    result: torch.Tensor = begin_broadcast(tensor, root_rank, name, process_set).wait()
    return result


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: Members = None
) -> torch.Tensor:
    """Broadcast as :func:`broadcast` does, in place and not differentiable; returns ``tensor``."""
    result: torch.Tensor = broadcast_async_(tensor, root_rank, name, process_set).wait()
    return result


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: Members = None
) -> Handle:
    """Start a :func:`broadcast` of the values that the root's tensor has now; not differentiable."""
    return begin_broadcast(tensor, root_rank, name, process_set)


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: Members = None
) -> Handle:
    """Start a :func:`broadcast_`; ``tensor`` must not be touched before :func:`synchronize` has returned."""
    return begin_broadcast(tensor, root_rank, name, process_set, in_place=True)


def alltoall(
    tensor: torch.Tensor, splits: Any = None, name: str | None = None, process_set: Members = None
) -> Any:
    """Send every rank its rows of ``tensor``; return the rows received, in rank order. Differentiable.

    ``splits`` gives the number of rows for each rank, as integers in rank order that add up to the first
    dimension. Then the result is ``(rows, received)``, where ``received`` (int32, on the host) is the number
    of rows from each rank. Without ``splits`` every rank gets equally many and the rows alone are returned.
    Tensors have at least one dimension; those behind the first must be the same on all ranks. Wire: two
    all-to-alls, 8 (N-1) bytes and the rows for other ranks.
    """
    if needs_gradient([tensor]):
        rows, received = AllToAll.apply(tensor, splits, name, process_set)  # type: ignore[no-untyped-call]
    else:
        rows, received = begin_alltoall(tensor, splits, name, process_set).wait()
    return rows if splits is None else (rows, received)


def alltoall_async(
    tensor: torch.Tensor, splits: Any = None, name: str | None = None, process_set: Members = None
) -> Handle:
    """Start an :func:`alltoall`; not differentiable.

    ``tensor`` must not be written before :func:`synchronize` has returned.
    """
    handle = begin_alltoall(tensor, splits, name, process_set)
    return handle.one() if splits is None else handle


def barrier(process_set: Members = None) -> None:
    """Return once every rank has called it. Wire: only the round in which calls are compared."""
    collectives.barrier(members(process_set)).result()
