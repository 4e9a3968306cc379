"""Collectives with the arguments of ``horovod.keras``, which are fewer and in another order."""

from __future__ import annotations

from typing import Any

from gradcomp.compress import Compression
from gradcomp.job.reduce_op import Average, ReduceOp
from gradcomp.tf import collectives


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: ReduceOp | None = None,
    compression: Any = Compression.none,
) -> Any:
    """Reduce ``value``, converted to a tensor, as :func:`gradcomp.tf.allreduce` does."""
    return collectives.allreduce(
        value,
        average,
        compression=compression,
        op=op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        name=name,
    )


def allgather(value: Any, name: str | None = None) -> Any:
    """Gather ``value``, converted to a tensor, as :func:`gradcomp.tf.allgather` does."""
    return collectives.allgather(value, name)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """Broadcast ``value``, converted to a tensor, as :func:`gradcomp.tf.broadcast` does."""
    return collectives.broadcast(value, root_rank, name)


def reducescatter(value: Any, name: str | None = None, op: ReduceOp = Average) -> Any:
    """Reduce and scatter ``value``, converted to a tensor, as :func:`gradcomp.tf.reducescatter` does."""
    return collectives.reducescatter(value, op=op, name=name)
