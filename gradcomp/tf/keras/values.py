"""Collectives of values as ``horovod.keras`` has them: the arguments are fewer, and in another order."""

from __future__ import annotations

from typing import Any

from gradcomp.compress import Compression
from gradcomp.job.reduce_op import Average, ReduceOp
from gradcomp.tf import moves, reductions


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: ReduceOp | None = None,
    compression: Any = Compression.none,
) -> Any:
    """See :func:`gradcomp.tf.allreduce`; ``value`` is what becomes a tensor."""
    return reductions.allreduce(
        value,
        average,
        compression=compression,
        op=op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        name=name,
    )


def allgather(value: Any, name: str | None = None) -> Any:
    """See :func:`gradcomp.tf.allgather`; ``value`` is what becomes a tensor."""
    return moves.allgather(value, name)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """See :func:`gradcomp.tf.broadcast`; ``value`` is what becomes a tensor."""
    return moves.broadcast(value, root_rank, name)


def reducescatter(value: Any, name: str | None = None, op: ReduceOp = Average) -> Any:
    """See :func:`gradcomp.tf.reducescatter`; ``value`` is what becomes a tensor."""
    return reductions.reducescatter(value, op=op, name=name)
