"""Collectives for the user's own tensors, with Horovod's meanings, in eager mode and inside tf.function.

All ranks call the same in the same order. Each call costs one small round (56 bytes per rank) in which the ranks
compare what they call; then the data move. d is the size of the tensor on the wire, N the number of ranks. In a world
of one nothing moves. ``process_set``: the ranks that take part, if not all (see :class:`ProcessSet`). ``name`` only
tells calls apart: ranks must agree on it.

All of them raise StateError before ``init``, ConfigError for an argument that cannot be exchanged and PlanMismatchError
if the calls differ, both on every rank, and TransportError if a rank is dead or stays away. What goes wrong while a
tf.function runs arrives as an error of TensorFlow's, in whose text these stand. Inside a tf.function the calls run in
program order, also those in branches, loops and inner functions. A branch that holds one must be taken by all ranks.

Gradients are those of the sum of all ranks' losses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from gradcomp.job import collectives, runtime
from gradcomp.job.collectives import Descriptor, refuse, splits_of
from gradcomp.job.network import Ranks
from gradcomp.job.process_sets import Members, members, root_of
from gradcomp.job.reduce_op import Average, ReduceOp, ScaledOp, Sum, reduce_op_of
from gradcomp.job.reducing import shares
from gradcomp.tf.ordered import plain, run
from gradcomp.tf.tensors import INTEGERS, NUMBERS, Array, bytes_of, dense


@plain
def allreduce(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    process_set: Members = None,
) -> Any:
    """The mean (default) or sum of ``tensor`` over ranks, as a new tensor of its dtype; differentiable.

    Dense tensors of any shape. float16 and bfloat16 are added in float32, integers in int64 (a sum that does not fit
    wraps); the average of integers is a ConfigError. ``average`` is Horovod's older spelling of ``op``; give one of
    them. Of a ``tf.IndexedSlices`` all ranks' rows and indices are gathered, divided by N for the mean: the result is
    one too, in which an index may stand more than once. Wire: one allreduce, 2 d (N-1)/N bytes per rank; for slices
    two allgathers.
    """
    reduce_op, problem = reduce_op_of(average, op)
    slices = tensor if isinstance(tensor, tf.IndexedSlices) else None
    given, wrong = dense(tensor if slices is None else slices.values, NUMBERS)
    ranks = _agreed("allreduce", given, name, process_set, problem or wrong, reduce_op)
    if slices is None:
        return _allreduce(given, reduce_op, name, ranks)
    rows = allgather(given, name, process_set)
    scaled = rows / tf.cast(len(ranks), rows.dtype) if reduce_op is Average and len(ranks) > 1 else rows
    return tf.IndexedSlices(scaled, allgather(slices.indices, name, process_set), slices.dense_shape)


def _allreduce(tensor: Any, op: ReduceOp, name: str | None, ranks: Ranks) -> Any:
    if len(ranks) == 1:
        return tf.identity(tensor)

    def reduce(value: Array) -> list[Array]:
        total = value.flatten()
        collectives.allreduce([_descriptor("allreduce", value, name, ranks, op)], [total]).result()
        return [total.reshape(value.shape)]

    def forward(x: Any) -> tuple[Any, Callable[[Any], Any]]:
        (y,) = run("allreduce", reduce, [x], [x.dtype])
        y.set_shape(x.shape)
        # The gradient of an average (sum) over ranks is the average (sum) of the gradients.
        return y, lambda gradient: _allreduce(tf.convert_to_tensor(gradient), op, name, ranks)

    return tf.custom_gradient(forward)(tensor)


@plain
def allgather(tensor: Any, name: str | None = None, process_set: Members = None) -> Any:
    """Every rank's ``tensor`` in rank order, joined along the first dimension; differentiable.

    Numbers of any dtype and bool, at least one dimension; first dimensions may differ between ranks, the others may
    not. Wire: one all-to-all, (N-1) d bytes per rank.
    """
    given, problem = dense(tensor)
    return _allgather(given, name, _agreed("allgather", given, name, process_set, problem))


def _allgather(tensor: Any, name: str | None, ranks: Ranks) -> Any:
    if len(ranks) == 1:
        return tf.identity(tensor)

    def gather(value: Array) -> list[Array]:
        called = _descriptor("allgather", value, name, ranks)
        ((whole, rows),) = collectives.allgather([called], [bytes_of(value)]).result()
        start = sum(rows[: ranks.index(runtime.rank())])
        return [_rows_of(whole, value, sum(rows)), np.asarray(start, np.int64)]

    def forward(x: Any) -> tuple[Any, Callable[[Any], Any]]:
        y, start = run("allgather", gather, [x], [x.dtype, tf.int64])
        _set_rows(y, None, x)

        def backward(gradient: Any) -> Any:
            """The gradient of a rank's part is the sum over ranks of the gradients of these rows."""
            whole = _allreduce(tf.convert_to_tensor(gradient), Sum, name, ranks)
            return whole[start : start + tf.shape(x, out_type=tf.int64)[0]]

        return y, backward

    return tf.custom_gradient(forward)(tensor)


@plain
def broadcast(tensor: Any, root_rank: int, name: str | None = None, process_set: Members = None) -> Any:
    """``root_rank``'s tensor on every rank, bit for bit, as a new tensor; differentiable.

    Numbers of any dtype and bool; dtype and shape must be the same on all ranks. ``root_rank`` is a number of the job,
    also where a process set takes part. The root's gradient is the sum of all ranks', the others' is zero. Wire: d
    bytes to every rank but the root, along a binomial tree.
    """
    given, problem = dense(tensor)
    ranks = _agreed("broadcast", given, name, process_set, problem or root_of(root_rank, process_set)[1])
    if len(ranks) == 1:
        return tf.identity(given)

    def send(value: Array) -> list[Array]:
        buffer = bytes_of(value).copy()
        collectives.broadcast(_descriptor("broadcast", value, name, ranks, root=root_rank), buffer).result()
        return [buffer.view(value.dtype).reshape(value.shape)]

    def forward(x: Any) -> tuple[Any, Callable[[Any], Any]]:
        (y,) = run("broadcast", send, [x], [x.dtype])
        y.set_shape(x.shape)

        def backward(gradient: Any) -> Any:
            total = _allreduce(tf.convert_to_tensor(gradient), Sum, name, ranks)
            return total if runtime.rank() == root_rank else tf.zeros_like(total)

        return y, backward

    return tf.custom_gradient(forward)(given)


@plain
def reducescatter(
    tensor: Any, op: ReduceOp | None = None, name: str | None = None, process_set: Members = None
) -> Any:
    """This rank's rows of the mean (default) or sum of ``tensor`` over ranks; differentiable.

    The first dimension is split over the ranks in rank order, in parts whose sizes differ by at most one, the larger
    ones first. Dtypes as in :func:`allreduce`; shapes must be the same on all ranks. Values are added in rank order,
    so the bytes do not depend on the transport. Wire: one all-to-all in the tensor's own dtype, d (N-1)/N bytes per
    rank. The gradient differs from Horovod's, which is N times this one.
    """
    reduce_op, problem = reduce_op_of(None, op)
    given, wrong = dense(tensor, NUMBERS)
    ranks = _agreed("reducescatter", given, name, process_set, problem or wrong, reduce_op)
    if len(ranks) == 1:
        return tf.identity(given)
    me = ranks.index(runtime.rank())

    def scatter(value: Array) -> list[Array]:
        called = _descriptor("reducescatter", value, name, ranks, reduce_op)
        (total,) = collectives.reducescatter([called], [np.ascontiguousarray(value).reshape(-1)]).result()
        return [total.reshape(shares(called.rows, len(ranks))[me], *value.shape[1:])]

    def forward(x: Any) -> tuple[Any, Callable[[Any], Any]]:
        (y,) = run("reducescatter", scatter, [x], [x.dtype])
        rows = None if x.shape.rank is None else x.shape[0]
        _set_rows(y, None if rows is None else shares(rows, len(ranks))[me], x)

        def backward(gradient: Any) -> Any:
            whole = _allgather(tf.convert_to_tensor(gradient), name, ranks)
            return whole / tf.cast(len(ranks), whole.dtype) if reduce_op is Average else whole

        return y, backward

    return tf.custom_gradient(forward)(given)


@plain
def alltoall(tensor: Any, splits: Any = None, name: str | None = None, process_set: Members = None) -> Any:
    """To every rank its rows of ``tensor``; the rows that they sent, joined in rank order. Differentiable.

    ``splits``: how many rows each rank gets, as integers in rank order; they add up to the first dimension. Then the
    result is ``(rows, received)``, where ``received`` (int32) says how many came from each. Without it every rank gets
    equally many and the rows alone are returned. Numbers of any dtype and bool, at least one dimension; dimensions
    behind the first must be the same on all ranks. Wire: two all-to-alls, 8 (N-1) bytes and the rows for other ranks.
    """
    given, problem = dense(tensor)
    counts = None
    if splits is not None:
        counts, wrong = dense(splits, INTEGERS)
        problem = problem or (f"splits: {wrong}" if wrong else None)
    ranks = _agreed("alltoall", given, name, process_set, problem)
    rows, received = _alltoall(given, counts, name, ranks)
    return rows if splits is None else (rows, received)


def _alltoall(tensor: Any, splits: Any, name: str | None, ranks: Ranks) -> tuple[Any, Any]:
    if len(ranks) == 1 and splits is None:
        return tf.identity(tensor), None

    def swap(value: Array, *given: Array) -> list[Array]:
        called = _descriptor("alltoall", value, name, ranks)
        parts, problem = splits_of(called, given[0] if given else None)
        whole, counts = collectives.alltoall(called, bytes_of(value), parts, problem).result()
        return [_rows_of(whole, value, sum(counts)), np.asarray(counts, np.int32)]

    def forward(x: Any) -> tuple[Any, Callable[..., Any]]:
        y, received = run("alltoall", swap, [x] if splits is None else [x, splits], [x.dtype, tf.int32])
        _set_rows(y, None, x)
        received.set_shape([len(ranks)])

        def backward(gradient: Any, _: Any) -> Any:
            """Every row's gradient goes back to where the row came from."""
            return _alltoall(tf.convert_to_tensor(gradient), received, name, ranks)[0]

        return (y, received), backward

    rows, received = tf.custom_gradient(forward)(tensor)
    return rows, received


@plain
def barrier(process_set: Members = None) -> None:
    """Return once every rank has called it. Wire: the round in which calls are compared, nothing else."""
    ranks = members(process_set)

    def meet() -> list[Array]:
        collectives.barrier(ranks).result()
        return []

    if len(ranks) > 1:
        run("barrier", meet, [], [])


# ------------------------------------------------------------------------------------------------- shared


def _agreed(
    kind: str,
    tensor: Any,
    name: str | None,
    process_set: Members,
    problem: str | None,
    op: ReduceOp | None = None,
) -> Ranks:
    """The ranks that take part. What is wrong is told to all of them, also while a function is traced."""
    ranks = members(process_set)
    if problem is None:
        # Where the rank is not known yet, the call finds out when it runs.
        shape = (0,) if tensor.shape.rank is None else tuple(size or 0 for size in tensor.shape)
        problem = Descriptor(kind, ranks, name, tensor.dtype.name, tensor.dtype.size, shape).problem
    if problem is None and op is not None:
        problem = _wrong_op(op, tensor.dtype)
    if problem is not None:
        refuse(kind, ranks, problem, name)
    return ranks


def _wrong_op(op: ReduceOp, dtype: Any) -> str | None:
    if op not in (Average, Sum):
        return f"op must be Average or Sum, got {op.name}"
    if op is Average and dtype.is_integer:
        return f"the average of {dtype.name} is not defined; use op=Sum, or a floating-point tensor"
    return None


def _descriptor(
    kind: str,
    value: Array,
    name: str | None,
    ranks: Ranks,
    op: ReduceOp | None = None,
    root: int | None = None,
) -> Descriptor:
    how = None if op is None else ScaledOp(op)
    return Descriptor(kind, ranks, name, value.dtype.name, value.itemsize, value.shape, how, root)


def _rows_of(data: Array, like: Array, rows: int) -> Array:
    return data.view(like.dtype).reshape(rows, *like.shape[1:])


def _set_rows(result: Any, rows: int | None, tensor: Any) -> None:
    """Give the result the static shape of so many rows of ``tensor``, as far as it is known."""
    if tensor.shape.rank is not None:
        result.set_shape([rows, *tensor.shape[1:]])
