"""Collectives on the user's own tensors, with Horovod's semantics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from gradcomp.compress import Compression
from gradcomp.job import collectives
from gradcomp.job.collectives import Descriptor
from gradcomp.job.process_sets import Members, members
from gradcomp.job.reduce_op import Average, ReduceOp, ScaledOp, Sum, coder_of, scaled_op_of
from gradcomp.torch.async_calls import (
    Handle,
    Tensors,
    begin_allgather,
    begin_allreduce,
    begin_alltoall,
    begin_broadcast,
    begin_reducescatter,
    bytes_view,
    coder,
    host,
    needs_gradient,
    tensor_of,
)
from gradcomp.torch.differentiable import LINEAR, AllGather, AllToAll, Broadcast, Reduce, Select
from gradcomp.torch.tensors import dtype_name


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Members = None,
) -> torch.Tensor:
    """Return ``postscale * op(prescale * tensor)`` over ranks as a new tensor; differentiable.

    ``compression`` is ``Compression.none``, ``.fp16`` or ``.bf16``, the dtype in which the tensor travels, or
    an object with functions ``compress`` and ``decompress``. ``average`` is Horovod's older spelling of
    ``op``; pass one of them. The gradient is that of the sum of all ranks' losses; Adasum has none. Wire: 2 d
    (N-1)/N bytes per rank, in one allreduce or two rounds; Adasum d log2(N).
    """
    how = scaled_op_of(average, op, prescale_factor, postscale_factor)
    return _reduce([tensor], name, compression, how, process_set)[0]


def grouped_allreduce(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Members = None,
) -> list[torch.Tensor]:
    """Reduce each tensor as :func:`allreduce` does, in one message for each dtype; differentiable."""
    how = scaled_op_of(average, op, prescale_factor, postscale_factor)
    return _reduce(tensors, name, compression, how, process_set)


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Members = None,
) -> torch.Tensor:
    """Reduce as :func:`allreduce` does, in place and not differentiable; returns ``tensor``."""
    allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, process_set).wait()
    return tensor


def grouped_allreduce_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Members = None,
) -> list[torch.Tensor]:
    """Reduce as :func:`grouped_allreduce` does, in place and not differentiable; returns the tensors."""
    grouped_allreduce_async_(
        tensors, average, name, op, prescale_factor, postscale_factor, process_set
    ).wait()
    return list(tensors)


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Members = None,
) -> Handle:
    """Start an :func:`allreduce` of the values that ``tensor`` has now; not differentiable."""
    how = scaled_op_of(average, op, prescale_factor, postscale_factor)
    return begin_allreduce([tensor], name, how, process_set).one()


def grouped_allreduce_async(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Members = None,
) -> Handle:
    """Start a :func:`grouped_allreduce` of the values that the tensors have now; not differentiable."""
    how = scaled_op_of(average, op, prescale_factor, postscale_factor)
    return begin_allreduce(tensors, name, how, process_set)


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Members = None,
) -> Handle:
    """Start an :func:`allreduce_`; ``tensor`` must not be touched before :func:`synchronize` has returned."""
    how = scaled_op_of(average, op, prescale_factor, postscale_factor)
    return begin_allreduce([tensor], name, how, process_set, in_place=True).one()


def grouped_allreduce_async_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Members = None,
) -> Handle:
    """Start a :func:`grouped_allreduce_`; no tensor may be touched before :func:`synchronize` has returned."""
    how = scaled_op_of(average, op, prescale_factor, postscale_factor)
    return begin_allreduce(tensors, name, how, process_set, in_place=True)


# ------------------------------------------------------------------------------------------- reducescatter


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: Any = Compression.none,
    op: ReduceOp = Average,
    process_set: Members = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Return this rank's rows of the reduction of ``tensor`` over ranks; differentiable for Average and Sum.

    The first dimension is split over the ranks in rank order, in parts whose sizes differ by at most one, the
    larger ones first. Any op but Adasum is allowed. Values are combined in rank order, so the bytes do not
    depend on the transport. The gradient of a row is that of the rank that holds it, N times that for Sum.
    Wire: d (N-1)/N bytes per rank.
    """
    how = scaled_op_of(None, op, prescale_factor, postscale_factor)
    return _reduce([tensor], name, compression, how, process_set, scatters=True)[0]


def grouped_reducescatter(
    tensors: Tensors,
    name: str | None = None,
    compression: Any = Compression.none,
    op: ReduceOp = Average,
    process_set: Members = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Reduce each tensor as :func:`reducescatter` does, in one message for each dtype; differentiable."""
    how = scaled_op_of(None, op, prescale_factor, postscale_factor)
    return _reduce(tensors, name, compression, how, process_set, scatters=True)


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: Members = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start a :func:`reducescatter`; not differentiable.

    ``tensor`` must not be written before :func:`synchronize` has returned.
    """
    how = scaled_op_of(None, op, prescale_factor, postscale_factor)
    return begin_reducescatter([tensor], name, how, process_set).one()


def grouped_reducescatter_async(
    tensors: Tensors,
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: Members = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start a :func:`grouped_reducescatter`; not differentiable.

    No tensor may be written before :func:`synchronize` has returned.
    """
    how = scaled_op_of(None, op, prescale_factor, postscale_factor)
    return begin_reducescatter(tensors, name, how, process_set)


# ------------------------------------------------------------------------------------------------- shared


def _reduce(
    tensors: Any,
    name: str | None,
    compression: Any,
    how: ScaledOp,
    process_set: Members,
    *,
    scatters: bool = False,
) -> list[torch.Tensor]:
    """Compress, reduce and decompress a group, recorded by autograd where a tensor requires gradients."""
    (compress, decompress), wrong = coder_of(compression, coder)
    if isinstance(tensors, torch.Tensor) or not isinstance(tensors, Sequence):
        coded, wrong = [(tensors, None)], f"not a list of tensors but {type(tensors).__name__}"
    else:
        coded = [compress(tensor) for tensor in tensors]
    sent = [tensor for tensor, _ in coded]
    if wrong is not None and how.problem is None:
        how = replace(how, problem=wrong)
    begin = begin_reducescatter if scatters else begin_allreduce
    if how.problem is not None or not needs_gradient(sent):
        results = begin(sent, name, how, process_set).wait()
    elif scatters or how.op in LINEAR:
        results = Reduce.apply(scatters, name, how, process_set, *sent)  # type: ignore[no-untyped-call]
    else:
        scaled = [tensor * how.prescale for tensor in sent] if how.prescale != 1.0 else sent
        results = Select.apply(name, ScaledOp(how.op), process_set, *scaled)  # type: ignore[no-untyped-call]
        results = [result * how.postscale for result in results] if how.postscale != 1.0 else results
    return [decompress(result, context) for result, (_, context) in zip(results, coded, strict=True)]


def allgather(tensor: torch.Tensor, name: str | None = None, process_set: Members = None) -> torch.Tensor:
    """Return every rank's ``tensor``, joined along the first dimension in rank order; differentiable.

    Tensors have at least one dimension; first dimensions may differ between ranks, the others may not. The
    gradient of a rank's part is the average over ranks of the gradients of its rows. Wire: one all-to-all,
    (N-1) d bytes per rank.
    """
    return grouped_allgather([tensor], name, process_set)[0]


def grouped_allgather(
    tensors: Tensors, name: str | None = None, process_set: Members = None
) -> list[torch.Tensor]:
    """Gather each tensor as :func:`allgather` does, all in one message; differentiable."""
    if isinstance(tensors, Sequence) and needs_gradient(tensors):
        return list(AllGather.apply(name, process_set, *tensors))  # type: ignore[no-untyped-call]
    results: list[torch.Tensor] = begin_allgather(tensors, name, process_set).wait()
    return results


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
    broadcast_async_(tensor, root_rank, name, process_set).wait()
    return tensor


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
    Tensors have at least one dimension; all dimensions but the first must be equal on all ranks. Wire: two
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


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str | None, op: ReduceOp, process_set: Members = None
) -> Handle:
    """Start the sum or mean over ranks of a sparse COO tensor; not differentiable.

    The result is a coalesced sparse tensor. The sum takes any dtype, the mean a floating-point one. Shape,
    dtype and number of sparse dimensions must be the same on all ranks, the number of entries need not. Equal
    indices are added in the tensor's own dtype. As Horovod's, the handle can be called. Wire: (N-1) (8 s + v)
    bytes an entry for s sparse dimensions and v bytes of values.
    """
    how, ranks = scaled_op_of(None, op), members(process_set)
    called = [Descriptor("sparse_allreduce", ranks, name)] * 2
    parts: list[Any] = []
    problem = how.problem or _problem(tensor, how.op)
    if problem is None:
        shape = f" in {list(tensor.shape)}"
        indices = host(tensor._indices().t(), copy=False)
        values = tensor._values()
        forms = [
            ("int64", 8, (values.shape[0], tensor.sparse_dim())),
            (dtype_name(values.dtype), values.element_size(), tuple(values.shape)),
        ]
        called = [Descriptor("sparse_allreduce", ranks, name, *form, how, note=shape) for form in forms]
        parts = [bytes_view(indices), bytes_view(host(values, copy=False))]

    def finish(gathered: list[tuple[Any, list[int]]]) -> torch.Tensor:
        (places, counts), (entries, _) = gathered
        dense = tensor._values()
        index = tensor_of(places.copy(), (sum(counts), tensor.sparse_dim()), tensor._indices())
        data = tensor_of(entries.copy(), (sum(counts), *dense.shape[1:]), dense)
        if how.op is Average:
            data = data / len(ranks)
        return torch.sparse_coo_tensor(index.t(), data, tensor.shape, check_invariants=True).coalesce()

    return Handle(collectives.allgather(called, parts, problem), finish)


def _problem(tensor: Any, op: ReduceOp) -> str | None:
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.sparse_coo:
        return "not a sparse COO tensor; use allreduce_async for dense ones"
    if op not in (Average, Sum):
        return f"op must be Average or Sum for sparse tensors, got {op.name}"
    if op is Average and not tensor.dtype.is_floating_point:
        return f"the average of sparse {dtype_name(tensor.dtype)} is not defined; use op=Sum"
    return None
