"""Reductions of the user's own tensors over ranks, with Horovod's semantics.

Each call costs one small round in which the ranks compare what they call; then the data move. An allreduce of
up to 4,096 bytes (16,384 / N from 5 ranks on) needs the small round alone, of 48 + 4,096 bytes to every rank.
d is the size of the tensors in bytes, N the number of ranks. In a world of one nothing moves.

``op`` is Average (default), Sum, Min, Max, Product, or Adasum. ``prescale_factor`` is applied before it,
``postscale_factor`` after it. Tensors are dense, of any shape, of float16, bfloat16, float32, float64, bool
or any integer dtype; results have the tensor's dtype and device. float16 and bfloat16 are combined in
float32, integers in int64: a sum that does not fit wraps, an average or a scaled value loses its fraction. On
bool, Sum and Max are "or", Product and Min "and".

``name`` tells a call from others: ranks may make named calls in any order, and calls without a name are
matched in order. ``process_set`` names the ranks that take part, if not all (see :class:`ProcessSet`).

All of them raise StateError before ``init``; on every rank ConfigError for an argument that cannot be
exchanged or a name whose last call has not ended, and PlanMismatchError if shape, dtype, op or factors
differ; and TransportError if a rank is dead or does not call in time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gradcomp.compress import Compression
from gradcomp.job.process_sets import Members
from gradcomp.job.reduce_op import Average, ReduceOp, ScaledOp, scaled_op_of
from gradcomp.torch.begin import begin_allreduce, begin_reducescatter
from gradcomp.torch.compression import coder_of
from gradcomp.torch.differentiable import reduce_tensors
from gradcomp.torch.handles import Handle

Tensors = Sequence[torch.Tensor]


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
    how, problem = scaled_op_of(average, op, prescale_factor, postscale_factor)
    return _compressed([tensor], name, compression, how, problem, process_set)[0]


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
    how, problem = scaled_op_of(average, op, prescale_factor, postscale_factor)
    return _compressed(tensors, name, compression, how, problem, process_set)


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
    handle = allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, process_set)
    result: torch.Tensor = handle.wait()
    return result


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
    handle = grouped_allreduce_async_(
        tensors, average, name, op, prescale_factor, postscale_factor, process_set
    )
    results: list[torch.Tensor] = handle.wait()
    return results


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
    how, problem = scaled_op_of(average, op, prescale_factor, postscale_factor)
    return begin_allreduce([tensor], name, how, problem, process_set).one()


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
    how, problem = scaled_op_of(average, op, prescale_factor, postscale_factor)
    return begin_allreduce(tensors, name, how, problem, process_set)


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
    how, problem = scaled_op_of(average, op, prescale_factor, postscale_factor)
    return begin_allreduce([tensor], name, how, problem, process_set, in_place=True).one()


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
    how, problem = scaled_op_of(average, op, prescale_factor, postscale_factor)
    return begin_allreduce(tensors, name, how, problem, process_set, in_place=True)


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
    how, problem = scaled_op_of(None, op, prescale_factor, postscale_factor)
    return _compressed([tensor], name, compression, how, problem, process_set, scatters=True)[0]


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
    how, problem = scaled_op_of(None, op, prescale_factor, postscale_factor)
    return _compressed(tensors, name, compression, how, problem, process_set, scatters=True)


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
    how, problem = scaled_op_of(None, op, prescale_factor, postscale_factor)
    return begin_reducescatter([tensor], name, how, problem, process_set).one()


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
    how, problem = scaled_op_of(None, op, prescale_factor, postscale_factor)
    return begin_reducescatter(tensors, name, how, problem, process_set)


# ------------------------------------------------------------------------------------------------- shared


def _compressed(
    tensors: Any,
    name: str | None,
    compression: Any,
    how: ScaledOp,
    problem: str | None,
    process_set: Members,
    *,
    scatters: bool = False,
) -> list[torch.Tensor]:
    """Reduce the compressed tensors, wait, and decompress the results."""
    (compress, decompress), wrong = coder_of(compression)
    if isinstance(tensors, torch.Tensor) or not isinstance(tensors, Sequence):
        coded = [(tensors, None)]
        problem = problem or f"not a list of tensors but {type(tensors).__name__}"
    else:
        coded = [compress(tensor) for tensor in tensors]
    sent = [tensor for tensor, _ in coded]
    results = reduce_tensors(sent, name, how, problem or wrong, process_set, scatters)
    return [decompress(result, context) for result, (_, context) in zip(results, coded, strict=True)]
