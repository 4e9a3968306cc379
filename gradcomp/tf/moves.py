"""Collectives that move the user's own tensors between ranks and change no value, with Horovod's semantics.

:mod:`gradcomp.tf.reductions` describes what all calls share: the comparison, names, process sets, errors and
tf.function. Tensors are dense, with numbers of any dtype, including complex ones, or bool. Results are new
tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gradcomp.job import collectives
from gradcomp.job.process_sets import Members, members, root_of
from gradcomp.tf.differentiable import broadcast_tensor, gather_tensors, swap_rows
from gradcomp.tf.ordered import plain, run
from gradcomp.tf.tensors import INTEGERS, Array, dense
from gradcomp.tf.wire import agreed, given_tensors


@plain
def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,  # noqa: ARG001
    process_set: Members = None,
) -> Any:
    """Return every rank's ``tensor``, joined along the first dimension in rank order; differentiable.

    Tensors have at least one dimension; first dimensions may differ between ranks, the others may not. The
    gradient of a rank's part is the mean over ranks of the gradients of its rows. Wire: one all-to-all, (N-1)
    d bytes per rank.
    """
    given, problem = given_tensors([tensor])
    return gather_tensors(given, name, agreed("allgather", given, name, process_set, problem))[0]


@plain
def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,  # noqa: ARG001
    process_set: Members = None,
) -> list[Any]:
    """Gather each tensor as :func:`allgather` does, all in one message."""
    given, problem = given_tensors(tensors)
    ranks = agreed("allgather", given, name, process_set, problem)
    return gather_tensors(given, name, ranks) if given else []


@plain
def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,  # noqa: ARG001
    process_set: Members = None,
) -> Any:
    """Return ``root_rank``'s tensor on every rank, bit for bit, as a new tensor; differentiable.

    Dtype and shape must be the same on all ranks. ``root_rank`` is a rank of the job, also if a process set
    takes part. The root's gradient is the mean over ranks of all gradients, the others' is zero. Wire: d
    bytes to every rank but the root, along a binomial tree.
    """
    given, problem = given_tensors([tensor])
    problem = problem or root_of(root_rank, process_set)[1]
    return broadcast_tensor(given[0], root_rank, name, agreed("broadcast", given, name, process_set, problem))


@plain
def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,  # noqa: ARG001
    process_set: Members = None,
) -> Any:
    """Send every rank its rows of ``tensor``; return the rows received, in rank order. Differentiable.

    ``splits`` gives the number of rows for each rank, as integers in rank order that add up to the first
    dimension. Then the result is ``(rows, received)``, where ``received`` (int32) is the number of rows from
    each rank. Without ``splits`` every rank gets equally many and the rows alone are returned. Dimensions
    behind the first must be the same on all ranks. The gradient of a row goes back to the rank that sent it.
    Wire: two all-to-alls, 8 (N-1) bytes and the rows for other ranks.
    """
    given, problem = given_tensors([tensor])
    counts = None
    if splits is not None:
        counts, wrong = dense(splits, INTEGERS)
        problem = problem or (f"splits: {wrong}" if wrong else None)
    rows, received = swap_rows(given[0], counts, name, agreed("alltoall", given, name, process_set, problem))
    return rows if splits is None else (rows, received)


@plain
def barrier(process_set: Members = None) -> None:
    """Return once every rank has called it. Wire: only the round in which calls are compared."""
    ranks = members(process_set)

    def meet() -> list[Array]:
        collectives.barrier(ranks).result()
        return []

    if len(ranks) > 1:
        run("barrier", meet, [], [])
