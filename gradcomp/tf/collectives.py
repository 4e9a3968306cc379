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

import math
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
import tensorflow as tf

from gradcomp.core.errors import WireFormatError
from gradcomp.job import runtime
from gradcomp.job.channel import Call, Channel, alone, current_channel
from gradcomp.job.process_sets import Members, members, root_of
from gradcomp.job.reduce_op import Average, ReduceOp, Sum, reduce_op_of
from gradcomp.tf.ordered import plain, run
from gradcomp.tf.tensors import INTEGERS, NUMBERS, Array, bytes_of, dense, form, narrow, rows_form, wide

_NO_ROWS = "a tensor without dimensions has no rows; use tf.reshape(tensor, [1])"


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
    problem = problem or wrong
    if problem is None and reduce_op is Average and given.dtype in INTEGERS:
        problem = f"the average of {given.dtype.name} is not defined; use op=Sum, or a floating-point tensor"
    if problem is not None:
        refuse("allreduce", problem, process_set)
    if slices is None:
        return _allreduce(given, reduce_op, name, process_set)
    ranks = len(members(process_set))
    rows = allgather(given, name, process_set)
    scaled = rows / tf.cast(ranks, rows.dtype) if reduce_op is Average and ranks > 1 else rows
    return tf.IndexedSlices(scaled, allgather(slices.indices, name, process_set), slices.dense_shape)


def _allreduce(tensor: Any, reduce_op: ReduceOp, name: str | None, process_set: Members) -> Any:
    if len(members(process_set)) == 1:
        return tf.identity(tensor)

    def reduce(value: Array) -> list[Array]:
        channel = the_channel(process_set)
        total = value.astype(wide(value.dtype), copy=True).reshape(-1)
        call = Call("allreduce", [f"allreduce(name={name!r}, op={reduce_op.name}) of {form(value)}"])
        channel.submit(call, lambda _: channel.allreduce(total)).result()
        if reduce_op is Average:
            total /= channel.size
        return [narrow(total, value.dtype).reshape(value.shape)]

    def forward(x: Any) -> tuple[Any, Callable[[Any], Any]]:
        (y,) = run("allreduce", reduce, [x], [x.dtype])
        y.set_shape(x.shape)
        # The gradient of an average (sum) over ranks is the average (sum) of the gradients.
        return y, lambda gradient: _allreduce(tf.convert_to_tensor(gradient), reduce_op, name, process_set)

    return tf.custom_gradient(forward)(tensor)


@plain
def allgather(tensor: Any, name: str | None = None, process_set: Members = None) -> Any:
    """Every rank's ``tensor`` in rank order, joined along the first dimension; differentiable.

    Numbers of any dtype and bool, at least one dimension; first dimensions may differ between ranks, the others may
    not. Wire: one all-to-all, (N-1) d bytes per rank.
    """
    given, problem = dense(tensor)
    if problem is None and given.shape.rank == 0:
        problem = _NO_ROWS
    if problem is not None:
        refuse("allgather", problem, process_set)
    return _allgather(given, name, process_set)


def _allgather(tensor: Any, name: str | None, process_set: Members) -> Any:
    if len(members(process_set)) == 1:
        return tf.identity(tensor)

    def gather(value: Array) -> list[Array]:
        channel = the_channel(process_set)
        row_bytes = math.prod(value.shape[1:]) * value.itemsize

        def work(all_rows: list[int]) -> tuple[Array, list[int]]:
            counts = _counts(all_rows)
            return channel.allgather(bytes_of(value), [n * row_bytes for n in counts]), counts

        rows, problem = _rows(value)
        call = Call("allgather", [f"allgather(name={name!r}) of {rows_form(value)}"], rows, problem)
        whole, counts = channel.submit(call, work).result()
        start = np.int64(sum(counts[: channel.rank]))
        return [whole.view(value.dtype).reshape(sum(counts), *value.shape[1:]), np.asarray(start)]

    def forward(x: Any) -> tuple[Any, Callable[[Any], Any]]:
        y, start = run("allgather", gather, [x], [x.dtype, tf.int64])
        _set_rows(y, None, x)

        def backward(gradient: Any) -> Any:
            """The gradient of a rank's part is the sum over ranks of the gradients of these rows."""
            whole = _allreduce(tf.convert_to_tensor(gradient), Sum, name, process_set)
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
    root, wrong_root = root_of(root_rank, process_set)
    problem = problem or wrong_root
    if problem is not None:
        refuse("broadcast", problem, process_set)
    if len(members(process_set)) == 1:
        return tf.identity(given)

    def send(value: Array) -> list[Array]:
        channel = the_channel(process_set)
        buffer = bytes_of(value).copy()
        call = Call("broadcast", [f"broadcast(root_rank={root_rank}, name={name!r}) of {form(value)}"])
        channel.submit(call, lambda _: channel.broadcast(buffer, root)).result()
        return [buffer.view(value.dtype).reshape(value.shape)]

    def forward(x: Any) -> tuple[Any, Callable[[Any], Any]]:
        (y,) = run("broadcast", send, [x], [x.dtype])
        y.set_shape(x.shape)

        def backward(gradient: Any) -> Any:
            total = _allreduce(tf.convert_to_tensor(gradient), Sum, name, process_set)
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
    problem = problem or wrong
    if problem is None and reduce_op is Average and given.dtype in INTEGERS:
        problem = f"the average of {given.dtype.name} is not defined; use op=Sum, or a floating-point tensor"
    if problem is None and given.shape.rank == 0:
        problem = _NO_ROWS
    if problem is not None:
        refuse("reducescatter", problem, process_set)
    ranks = members(process_set)
    if len(ranks) == 1:
        return tf.identity(given)

    def scatter(value: Array) -> list[Array]:
        channel = the_channel(process_set)
        row_bytes = math.prod(value.shape[1:]) * value.itemsize
        rows, problem = _rows(value)
        shares = _parts(rows, channel.size)
        own = shares[channel.rank]
        line = f"reducescatter(name={name!r}, op={reduce_op.name}) of {form(value)}"
        call = Call("reducescatter", [line], problem=problem)
        sends, recvs = [n * row_bytes for n in shares], [own * row_bytes] * channel.size
        received = channel.submit(call, lambda _: channel.alltoall(bytes_of(value), sends, recvs)).result()
        parts = received.view(value.dtype).reshape(channel.size, own, *value.shape[1:])
        total = parts[0].astype(wide(value.dtype))
        for part in parts[1:]:
            total += part.astype(total.dtype)
        if reduce_op is Average:
            total /= channel.size
        return [narrow(total, value.dtype)]

    def forward(x: Any) -> tuple[Any, Callable[[Any], Any]]:
        (y,) = run("reducescatter", scatter, [x], [x.dtype])
        rows = None if x.shape.rank is None else x.shape[0]
        own = None if rows is None else _parts(rows, len(ranks))[ranks.index(runtime.rank())]
        _set_rows(y, own, x)

        def backward(gradient: Any) -> Any:
            whole = _allgather(tf.convert_to_tensor(gradient), name, process_set)
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
    if problem is None and given.shape.rank == 0:
        problem = _NO_ROWS
    counts = None
    if splits is not None:
        counts, wrong = dense(splits, INTEGERS)
        problem = problem or (f"splits: {wrong}" if wrong else None)
    if problem is not None:
        refuse("alltoall", problem, process_set)
    rows, received = _alltoall(given, counts, name, process_set)
    return rows if splits is None else (rows, received)


def _alltoall(tensor: Any, splits: Any, name: str | None, process_set: Members) -> tuple[Any, Any]:
    size = len(members(process_set))
    if size == 1 and splits is None:
        return tf.identity(tensor), None

    def swap(value: Array, *given: Array) -> list[Array]:
        channel = current_channel(process_set)
        parts, problem = _splits(value, given[0] if given else None, size)
        call = Call("alltoall", [f"alltoall(name={name!r}) of {rows_form(value)}"], problem=problem)
        if channel is None:
            alone(call).result()
            return [value.copy(), np.asarray(parts, np.int32)]
        row_bytes = math.prod(value.shape[1:]) * value.itemsize

        def work(_: list[int]) -> tuple[Array, list[int]]:
            eight = [8] * channel.size
            told = channel.alltoall(np.asarray(parts, np.int64).view(np.uint8), eight, eight)
            counts = _counts(told.view(np.int64).tolist())
            sends, recvs = ([n * row_bytes for n in one] for one in (parts, counts))
            return channel.alltoall(bytes_of(value), sends, recvs), counts

        whole, counts = channel.submit(call, work).result()
        joined = whole.view(value.dtype).reshape(sum(counts), *value.shape[1:])
        return [joined, np.asarray(counts, np.int32)]

    def forward(x: Any) -> tuple[Any, Callable[..., Any]]:
        y, received = run("alltoall", swap, [x] if splits is None else [x, splits], [x.dtype, tf.int32])
        _set_rows(y, None, x)
        received.set_shape([size])

        def backward(gradient: Any, _: Any) -> Any:
            """Every row's gradient goes back to where the row came from."""
            return _alltoall(tf.convert_to_tensor(gradient), received, name, process_set)[0]

        return (y, received), backward

    rows, received = tf.custom_gradient(forward)(tensor)
    return rows, received


@plain
def barrier(process_set: Members = None) -> None:
    """Return once every rank has called it. Wire: the round in which calls are compared, nothing else."""

    def meet() -> list[Array]:
        the_channel(process_set).submit(Call("barrier", ["barrier()"]), lambda _: None).result()
        return []

    if len(members(process_set)) > 1:
        run("barrier", meet, [], [])


# ------------------------------------------------------------------------------------------------- shared


def the_channel(process_set: Members) -> Channel:
    """The channel of more than one rank."""
    channel = current_channel(process_set)
    assert channel is not None, "a world of one has no channel"
    return channel


def refuse(name: str, problem: str, process_set: Members) -> NoReturn:
    """Meet the other ranks with a problem, so that all of them raise ConfigError; also while a function is traced."""
    call = Call(name, [], problem=problem)
    channel = current_channel(process_set)
    (alone(call) if channel is None else channel.submit(call, lambda _: None)).result()
    raise AssertionError("a call with a problem cannot succeed")


def _rows(value: Array) -> tuple[int, str | None]:
    """How many rows there are, and why there are none: the rank may be unknown until a function runs."""
    return (len(value), None) if value.ndim else (0, _NO_ROWS)


def _parts(rows: int, size: int) -> list[int]:
    """Sizes that differ by at most one, the larger ones first."""
    return [rows // size + (place < rows % size) for place in range(size)]


def _splits(value: Array, given: Array | None, size: int) -> tuple[list[int], str | None]:
    """How many rows each rank gets, and what is wrong with that."""
    rows, problem = _rows(value)
    if problem is not None:
        return [], problem
    if given is None:
        wrong = f"the first dimension is {rows}, which {size} ranks cannot share equally; give splits"
        return [rows // size] * size, wrong if rows % size else None
    parts = [int(part) for part in given.reshape(-1)]
    if given.shape != (size,) or min(parts) < 0 or sum(parts) != rows:
        return parts, f"splits must be {size} numbers that add up to {rows} rows, got {given.tolist()}"
    return parts, None


def _counts(numbers: list[int]) -> list[int]:
    if min(numbers) < 0:
        raise WireFormatError(f"first dimensions {numbers}")
    return numbers


def _set_rows(result: Any, rows: int | None, tensor: Any) -> None:
    """Give the result the static shape of so many rows of ``tensor``, as far as it is known."""
    if tensor.shape.rank is not None:
        result.set_shape([rows, *tensor.shape[1:]])
