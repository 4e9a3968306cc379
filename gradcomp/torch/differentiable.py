"""Gradients of the collectives, as Horovod defines them.

Those of ``allreduce`` and ``alltoall`` are the gradients of the sum of all ranks' losses. Those of
``allgather`` and ``broadcast`` are 1/N of that; those of ``reducescatter`` are N times that.
"""

from __future__ import annotations

from typing import Any

import torch

from gradcomp.core.errors import ConfigError
from gradcomp.job import runtime
from gradcomp.job.process_sets import members
from gradcomp.job.reduce_op import Average, ReduceOp, ScaledOp, Sum
from gradcomp.torch.async_calls import (
    begin_allgather,
    begin_allreduce,
    begin_alltoall,
    begin_broadcast,
    begin_reducescatter,
)

#: The operations that are linear in every rank's values.
LINEAR = (ReduceOp.AVERAGE, ReduceOp.SUM)


def gradient_name(name: str | None) -> str | None:
    return f"{name}.gradient" if isinstance(name, str) else None


class Reduce(torch.autograd.Function):
    """The gradient of a scaled average (sum) over ranks is the scaled average (sum) of the gradients.

    With ``scatters`` the gradient of a row is that of the rank that holds it, scaled as the row was; for Sum it is N
    times that.
    """

    @staticmethod
    def forward(
        ctx: Any, scatters: bool, name: Any, how: ScaledOp, process_set: Any, *tensors: torch.Tensor
    ) -> Any:
        ctx.arguments = scatters, name, how, process_set
        begin = begin_reducescatter if scatters else begin_allreduce
        return tuple(begin(tensors, name, how, process_set).wait())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        scatters, name, how, process_set = ctx.arguments
        if how.op not in LINEAR:
            raise ConfigError(f"reducescatter: op={how.op.name} has no gradient; use Average or Sum")
        if not scatters:
            handle = begin_allreduce(gradients, gradient_name(name), how, process_set)
            return None, None, None, None, *handle.wait()
        factor = how.prescale * how.postscale
        if how.op is ReduceOp.SUM:
            factor *= len(members(process_set))
        wholes = begin_allgather(gradients, gradient_name(name), process_set).wait()
        return None, None, None, None, *(whole * factor if factor != 1.0 else whole for whole in wholes)


class Select(torch.autograd.Function):
    """The ranks that hold a minimum or maximum share its gradient; in a product each gets the others' product."""

    @staticmethod
    def forward(ctx: Any, name: Any, how: ScaledOp, process_set: Any, *tensors: torch.Tensor) -> Any:
        results = tuple(begin_allreduce(tensors, name, how, process_set).wait())
        ctx.arguments = name, how, process_set
        ctx.save_for_backward(*tensors, *results)
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        name, how, process_set = ctx.arguments
        count = len(gradients)
        given, results = ctx.saved_tensors[:count], ctx.saved_tensors[count:]
        if how.op is ReduceOp.ADASUM:
            raise ConfigError("allreduce: op=ADASUM has no gradient; use Average or Sum")
        own = gradient_name(name)
        if how.op is ReduceOp.PRODUCT:
            gathered = begin_allgather([tensor.unsqueeze(0) for tensor in given], own, process_set).wait()
            totals = begin_allreduce(gradients, own, ScaledOp(Sum), process_set).wait()
            me = members(process_set).index(runtime.rank())
            rest = [torch.cat([every[:me], every[me + 1 :]]).prod(0) for every in gathered]
            return None, None, None, *(total * others for total, others in zip(totals, rest, strict=True))
        chosen = [
            (tensor == result).to(gradient.dtype)
            for tensor, result, gradient in zip(given, results, gradients, strict=True)
        ]
        sums = begin_allreduce([*gradients, *chosen], own, ScaledOp(Sum), process_set).wait()
        shared = (
            total * mine / number.clamp(min=1)
            for total, number, mine in zip(sums[:count], sums[count:], chosen, strict=True)
        )
        return None, None, None, *shared


class AllGather(torch.autograd.Function):
    """The gradient of a rank's part is the average over ranks of the gradients of its rows."""

    @staticmethod
    def forward(ctx: Any, name: Any, process_set: Any, *tensors: torch.Tensor) -> Any:
        starts: list[int] = []
        wholes = begin_allgather(tensors, name, process_set, starts).wait()
        own = [slice(at, at + len(tensor)) for at, tensor in zip(starts, tensors, strict=True)]
        ctx.arguments = name, process_set, own
        return tuple(wholes)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        name, process_set, own = ctx.arguments
        means = begin_allreduce(gradients, gradient_name(name), ScaledOp(Average), process_set).wait()
        return None, None, *(mean[rows] for mean, rows in zip(means, own, strict=True))


class Broadcast(torch.autograd.Function):
    """The gradient of the root's tensor is the average over ranks of the gradients; the others' is zero."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, root_rank: int, name: Any, process_set: Any) -> Any:
        ctx.arguments = root_rank, name, process_set
        return begin_broadcast(tensor, root_rank, name, process_set).wait()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        root_rank, name, process_set = ctx.arguments
        (mean,) = begin_allreduce(gradients, gradient_name(name), ScaledOp(Average), process_set).wait()
        return mean if runtime.rank() == root_rank else torch.zeros_like(mean), None, None, None


class AllToAll(torch.autograd.Function):
    """The gradient of a row goes back to the rank that sent the row."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, splits: Any, name: Any, process_set: Any) -> Any:
        """Return the received rows, and the number of rows from each rank."""
        rows, received = begin_alltoall(tensor, splits, name, process_set).wait()
        ctx.arguments = received, name, process_set
        ctx.mark_non_differentiable(received)
        return rows, received

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        received, name, process_set = ctx.arguments
        rows, _ = begin_alltoall(gradients[0], received, gradient_name(name), process_set).wait()
        return rows, None, None, None
