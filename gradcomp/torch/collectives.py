"""Collectives for the user's own tensors and objects, with Horovod's meanings.

All ranks call the same in the same order. Each call costs one small round (56 bytes per rank) in which the ranks
compare what they call; then the data move. d is the size of the tensor on the wire, N the number of ranks. In a world
of one nothing moves. ``process_set``: the ranks that take part, if not all (see :class:`ProcessSet`).

All of them raise StateError before ``init``, ConfigError for an argument that cannot be exchanged and PlanMismatchError
if the calls differ, both on every rank, and TransportError if a rank is dead or stays away.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch

from gradcomp.job import collectives, runtime
from gradcomp.job.collectives import Descriptor
from gradcomp.job.process_sets import Members, members
from gradcomp.job.reduce_op import ReduceOp, Sum, reduce_op_of
from gradcomp.torch.tensors import bytes_of, dense_problem, dtype_name

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class Handle:
    """An operation under way; give it to :func:`poll` and :func:`synchronize`."""

    def __init__(self, future: Future[Any], finish: Callable[[], torch.Tensor]) -> None:
        self._future = future
        self._finish = finish
        self._result: torch.Tensor | None = None

    def poll(self) -> bool:
        """True once :meth:`wait` returns, or raises, at once."""
        return self._future.done()

    def wait(self) -> torch.Tensor:
        """The result, the same each time."""
        if self._result is None:
            self._future.result()
            with torch.no_grad():
                self._result = self._finish()
        return self._result


# ---------------------------------------------------------------------------------------------- allreduce


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    process_set: Members = None,
) -> torch.Tensor:
    """The mean (default) or sum of ``tensor`` over ranks, as a new tensor of its dtype and device; differentiable.

    Dense tensors of any shape. float16 and bfloat16 are added in float32, integers in int64 (a sum that does not fit
    wraps); the average of integers is a ConfigError. ``average`` is Horovod's older spelling of ``op``; give one of
    them. Wire: one allreduce, 2 d (N-1)/N bytes per rank.
    """
    if torch.is_grad_enabled() and isinstance(tensor, torch.Tensor) and tensor.requires_grad:
        return _AllReduce.apply(tensor, average, name, op, process_set)  # type: ignore[no-any-return, no-untyped-call]
    return allreduce_async(tensor, average, name, op, process_set).wait()


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    process_set: Members = None,
) -> torch.Tensor:
    """As :func:`allreduce`, in place and not differentiable; returns ``tensor``."""
    return allreduce_async_(tensor, average, name, op, process_set).wait()


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    process_set: Members = None,
) -> Handle:
    """Begin an :func:`allreduce` of the values that ``tensor`` has now; not differentiable."""
    return _begin_allreduce(tensor, average, name, op, process_set, None)


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    process_set: Members = None,
) -> Handle:
    """Begin an :func:`allreduce_`; ``tensor`` is overwritten by :func:`synchronize`, not before."""
    return _begin_allreduce(tensor, average, name, op, process_set, tensor)


def poll(handle: Handle) -> bool:
    """Whether :func:`synchronize` would return at once. Local."""
    return handle.poll()


def synchronize(handle: Handle) -> torch.Tensor:
    """Wait for an operation; its result. A second call returns the same. Raises what the operation raised."""
    return handle.wait()


def _begin_allreduce(
    tensor: torch.Tensor,
    average: bool | None,
    name: str | None,
    op: ReduceOp | None,
    process_set: Members,
    out: torch.Tensor | None,
) -> Handle:
    reduce_op, problem = reduce_op_of(average, op)
    problem = problem or dense_problem(tensor, (*_FLOATS, *_INTEGERS))
    wire = torch.empty(0) if problem else _to_wire(tensor)
    called = _descriptor("allreduce", tensor, name, process_set, problem, reduce_op)

    def finish() -> torch.Tensor:
        result = wire.view(tensor.shape).to(tensor.device, tensor.dtype)
        return result if out is None else out.copy_(result)

    return Handle(collectives.allreduce(called, wire.numpy(), problem), finish)


def _descriptor(
    kind: str,
    tensor: torch.Tensor,
    name: str | None,
    process_set: Members,
    problem: str | None,
    op: ReduceOp | None = None,
) -> Descriptor:
    ranks = members(process_set)
    if problem is not None:
        return Descriptor(kind, ranks)
    form = dtype_name(tensor.dtype), tensor.element_size(), tuple(tensor.shape)
    return Descriptor(kind, ranks, name, *form, op)


def _to_wire(tensor: torch.Tensor) -> torch.Tensor:
    """A flat copy in host memory, in the dtype in which ranks are added."""
    wide = tensor.dtype
    if wide in (torch.float16, torch.bfloat16):
        wide = torch.float32
    elif wide in _INTEGERS:
        wide = torch.int64
    return tensor.detach().to("cpu", wide, copy=True).contiguous().view(-1)


class _AllReduce(torch.autograd.Function):
    """The gradient of an average (sum) over ranks is the average (sum) of the gradients."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, *arguments: Any) -> torch.Tensor:
        ctx.arguments = arguments
        return allreduce_async(tensor, *arguments).wait()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        return allreduce_async(gradients[0], *ctx.arguments).wait(), None, None, None, None


# --------------------------------------------------------------------------------------- allgather, barrier


def allgather(tensor: torch.Tensor, name: str | None = None, process_set: Members = None) -> torch.Tensor:
    """Every rank's ``tensor`` in rank order, joined along the first dimension; differentiable.

    Any dtype, at least one dimension; first dimensions may differ between ranks, the others may not. Returns a new
    tensor on the same device. Wire: one all-to-all, (N-1) d bytes per rank.
    """
    if torch.is_grad_enabled() and isinstance(tensor, torch.Tensor) and tensor.requires_grad:
        return _AllGather.apply(tensor, name, process_set)  # type: ignore[no-any-return, no-untyped-call]
    return _allgather(tensor, name, process_set)[0]


def _allgather(tensor: torch.Tensor, name: str | None, process_set: Members) -> tuple[torch.Tensor, int]:
    """The joined tensor, and the row at which this rank's part begins."""
    problem = dense_problem(tensor)
    called = _descriptor("allgather", tensor, name, process_set, problem)
    part = torch.empty(0, dtype=torch.uint8) if problem else bytes_of(tensor)
    whole, rows = collectives.allgather(called, part.numpy(), problem).result()
    # A copy among one rank; and an empty array has a stride that torch cannot view as another dtype.
    joined = torch.from_numpy(whole.copy() if len(rows) == 1 else whole) if len(whole) else part[:0].clone()
    start = sum(rows[: called.ranks.index(runtime.rank())])
    return joined.view(tensor.dtype).view(sum(rows), *tensor.shape[1:]).to(tensor.device), start


class _AllGather(torch.autograd.Function):
    """The gradient of a rank's part is the sum over ranks of the gradients of these rows."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, name: Any, process_set: Any) -> torch.Tensor:
        joined, ctx.start = _allgather(tensor, name, process_set)
        ctx.rows, ctx.name, ctx.process_set = tensor.shape[0], name, process_set
        return joined

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        whole = allreduce_async(gradients[0], name=ctx.name, op=Sum, process_set=ctx.process_set).wait()
        return whole[ctx.start : ctx.start + ctx.rows], None, None


def barrier(process_set: Members = None) -> None:
    """Return once every rank has called it. Wire: the round in which calls are compared, nothing else."""
    collectives.barrier(members(process_set)).result()
