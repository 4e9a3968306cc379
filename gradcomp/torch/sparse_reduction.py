"""Reduces sparse tensors by gathering their entries."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from gradcomp.job import collectives
from gradcomp.job.collectives import Descriptor
from gradcomp.job.process_sets import Members, members
from gradcomp.job.reduce_op import Average, ReduceOp, ScaledOp, Sum, reduce_op_of
from gradcomp.torch.handles import Handle
from gradcomp.torch.tensors import dtype_name
from gradcomp.torch.wire import bytes_view, host, tensor_of


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str | None, op: ReduceOp, process_set: Members = None
) -> Handle:
    """Start the sum or mean over ranks of a sparse COO tensor; not differentiable.

    The result is a coalesced sparse tensor. The sum takes any dtype, the mean a floating-point one. Shape,
    dtype and number of sparse dimensions must be the same on all ranks, the number of entries need not. Equal
    indices are added in the tensor's own dtype. As Horovod's, the handle can be called. Wire: (N-1) (8 s + v)
    bytes an entry for s sparse dimensions and v bytes of values.
    """
    reduce_op, problem = reduce_op_of(None, op)
    ranks = members(process_set)
    called = [Descriptor("sparse_allreduce", ranks, name)] * 2
    parts: list[Any] = []
    problem = problem or _problem(tensor, reduce_op)
    if problem is None:
        shape = f" in {list(tensor.shape)}"
        indices = host(tensor._indices().t(), copy=False)
        values = tensor._values()
        how, entries = ScaledOp(reduce_op), values.shape[0]
        one = Descriptor(
            "sparse_allreduce", ranks, name, "int64", 8, (entries, tensor.sparse_dim()), how, note=shape
        )
        form = dtype_name(values.dtype), values.element_size(), tuple(values.shape)
        called = [one, replace(one, dtype=form[0], itemsize=form[1], shape=form[2])]
        parts = [bytes_view(indices), bytes_view(host(values, copy=False))]

    def finish(gathered: list[tuple[Any, list[int]]]) -> torch.Tensor:
        (places, counts), (entries, _) = gathered
        dense = tensor._values()
        index = tensor_of(places.copy(), (sum(counts), tensor.sparse_dim()), tensor._indices())
        data = tensor_of(entries.copy(), (sum(counts), *dense.shape[1:]), dense)
        if reduce_op is Average:
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
