"""Collectives on the user's own tensors, with Horovod's semantics, in eager mode and inside tf.function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from gradcomp.compress import Compression
from gradcomp.compress.quantise.cast import CODERS, Coder
from gradcomp.core.errors import ConfigError
from gradcomp.job import collectives, runtime
from gradcomp.job.collectives import Descriptor, refuse
from gradcomp.job.launch import Ranks
from gradcomp.job.process_sets import Members, ProcessSet, global_process_set, members, root_of
from gradcomp.job.reduce_op import Average, ReduceOp, ScaledOp, Sum, coder_of, scaled_op_of
from gradcomp.tf import bridge, differentiable
from gradcomp.tf.bridge import (
    INTEGERS,
    REDUCIBLE,
    VALUES,
    Array,
    UnsupportedError,
    dense,
    plain,
    refuse_xla,
    run,
)
from gradcomp.tf.differentiable import Tensors

__all__ = [
    "allgather", "allreduce", "alltoall", "barrier", "broadcast", "grouped_allgather", "grouped_allreduce",
    "grouped_reducescatter", "local_rank_op", "local_size_op", "process_set_included_op", "rank_op", "reducescatter",
    "size_op",
]  # fmt: skip

_UNSUPPORTED = "tf.IndexedSlices take Average and Sum only, without factors; use tf.convert_to_tensor"


@plain
def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",  # noqa: ARG001
    device_sparse: str = "",  # noqa: ARG001
    compression: Any = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: Members = None,
    ignore_name_scope: bool = False,  # noqa: ARG001
) -> Any:
    """Return ``postscale * op(prescale * tensor)`` over ranks as a new tensor; differentiable.

    ``average`` is Horovod's older spelling of ``op``; pass one of them. The gradient is the same allreduce of
    the gradients. Given a ``tf.IndexedSlices``, all ranks' rows and indices are gathered, and divided by N
    for the average. The result is a ``tf.IndexedSlices`` in which an index may occur more than once. Slices
    support Average and Sum, without factors, and are not compressed. Wire: 2 d (N-1)/N bytes per rank, in one
    allreduce or two rounds; Adasum d log2(N); slices one allgather.
    """
    how = scaled_op_of(average, op, prescale_factor, postscale_factor)
    return _reduced("allreduce", [tensor], name, compression, how, process_set)[0]


@plain
def grouped_allreduce(
    tensors: Tensors,
    average: bool | None = None,
    device_dense: str = "",  # noqa: ARG001
    device_sparse: str = "",  # noqa: ARG001
    compression: Any = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Members = None,
    ignore_name_scope: bool = False,  # noqa: ARG001
    name: str | None = None,
) -> list[Any]:
    """Reduce each tensor as :func:`allreduce` does, in one message for each dtype.

    All slices of the group travel in one allgather.
    """
    how = scaled_op_of(average, op, prescale_factor, postscale_factor)
    return _reduced("allreduce", tensors, name, compression, how, process_set)


@plain
def reducescatter(
    tensor: Any,
    device_dense: str = "",  # noqa: ARG001
    compression: Any = Compression.none,
    op: ReduceOp = Average,
    name: str | None = None,
    process_set: Members = None,
    ignore_name_scope: bool = False,  # noqa: ARG001
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Return this rank's rows of ``postscale * op(prescale * tensor)`` over ranks.

    Differentiable for Average and Sum. The first dimension is split over the ranks in rank order, in parts
    whose sizes differ by at most one, the larger ones first. Any ``op`` but Adasum is allowed. Values are
    combined in rank order, so the bytes do not depend on the transport. The gradient of a row is that of the
    rank that holds it, times the factors and, for Sum, times N. Wire: one all-to-all, d (N-1)/N bytes per
    rank.
    """
    how = scaled_op_of(None, op, prescale_factor, postscale_factor)
    return _reduced("reducescatter", [tensor], name, compression, how, process_set)[0]


@plain
def grouped_reducescatter(
    tensors: Tensors,
    device_dense: str = "",  # noqa: ARG001
    compression: Any = Compression.none,
    op: ReduceOp = Average,
    process_set: Members = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
) -> list[Any]:
    """Reduce each tensor as :func:`reducescatter` does, in one message for each dtype."""
    how = scaled_op_of(None, op, prescale_factor, postscale_factor)
    return _reduced("reducescatter", tensors, name, compression, how, process_set)


def _reduced(
    kind: str, tensors: Any, name: str | None, compression: Any, how: ScaledOp, process_set: Members
) -> list[Any]:
    """Reduce a group; an "allreduce" takes tf.IndexedSlices too."""
    slices, problem = {}, how.problem
    if kind == "allreduce" and isinstance(tensors, list | tuple):
        slices = {place: given for place, given in enumerate(tensors) if isinstance(given, tf.IndexedSlices)}
        tensors = [given.values if place in slices else given for place, given in enumerate(tensors)]
    if slices and (how.op not in (Average, Sum) or how.scales):
        problem = problem or _UNSUPPORTED
    (compress, decompress), unknown = coder_of(compression, _coder)
    try:
        given, ranks = _agreed(kind, tensors, name, process_set, problem or unknown, how)
    except ConfigError as error:
        raise UnsupportedError(None, None, str(error)) if problem is _UNSUPPORTED else error  # noqa: B904
    places = [place for place in range(len(given)) if place not in slices]
    results: list[Any] = [None] * len(given)
    if places:
        coded, contexts = zip(*(compress(given[place]) for place in places), strict=True)
        reduce = (
            differentiable.reduce_tensors if kind == "allreduce" else differentiable.reducescatter_tensors
        )
        for place, tensor, context in zip(places, reduce(coded, name, how, ranks), contexts, strict=True):
            results[place] = decompress(tensor, context)
    if slices:
        parts = [*(given[place] for place in slices), *(each.indices for each in slices.values())]
        # Only one call at a time may have a name, and the dense tensors' call has this one.
        gathered = differentiable.gather_tensors(parts, f"{name}.slices" if places and name else name, ranks)
        rows, indices = gathered[: len(slices)], gathered[len(slices) :]
        for (place, each), values, index in zip(slices.items(), rows, indices, strict=True):
            averages = how.op is Average and len(ranks) > 1
            scaled = values / tf.cast(len(ranks), values.dtype) if averages else values
            results[place] = tf.IndexedSlices(scaled, index, each.dense_shape)
    return results


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
    return grouped_allgather([tensor], name, process_set=process_set)[0]


@plain
def grouped_allgather(
    tensors: Tensors,
    name: str | None = None,
    ignore_name_scope: bool = False,  # noqa: ARG001
    process_set: Members = None,
) -> list[Any]:
    """Gather each tensor as :func:`allgather` does, all in one message."""
    given, ranks = _agreed("allgather", tensors, name, process_set)
    return differentiable.gather_tensors(given, name, ranks) if given else []


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
    problem = root_of(root_rank, process_set)[1]
    given, ranks = _agreed("broadcast", [tensor], name, process_set, problem)
    return differentiable.broadcast_tensor(given[0], root_rank, name, ranks)


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
    each rank. Without ``splits`` every rank gets equally many and the rows alone are returned. All
    dimensions but the first must be equal on all ranks. The gradient of a row goes back to the rank that sent it.
    Wire: two all-to-alls, 8 (N-1) bytes and the rows for other ranks.
    """
    counts, wrong = (None, None) if splits is None else dense(splits, INTEGERS)
    problem = None if wrong is None else f"splits: {wrong}"
    given, ranks = _agreed("alltoall", [tensor], name, process_set, problem)
    rows, received = differentiable.swap_rows(given[0], counts, name, ranks)
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


def _agreed(
    kind: str,
    tensors: Any,
    name: str | None,
    process_set: Members,
    problem: str | None = None,
    how: ScaledOp | None = None,
) -> tuple[list[Any], Ranks]:
    """Return a group as tensors, and the ranks that take part.

    It raises a problem on all of these, also while a function is traced.
    """
    ranks = members(process_set)
    if not isinstance(tensors, list | tuple):
        problem = problem or f"not a list of tensors but {type(tensors).__name__}"
        tensors = []
    given = []
    for place, value in enumerate(tensors):
        tensor, wrong = dense(value, VALUES if how is None else REDUCIBLE)
        if tensor is not None:
            # If the number of dimensions is not known yet, the call checks it when it runs.
            shape = (0,) if tensor.shape.rank is None else tuple(size or 0 for size in tensor.shape)
            wrong = Descriptor(kind, ranks, name, tensor.dtype.name, tensor.dtype.size, shape, how).problem
        elif len(tensors) > 1:
            wrong = f"tensor {place}: {wrong}"
        problem = problem or wrong
        given.append(tensor)
    if problem is not None:
        refuse(kind, ranks, problem, name if isinstance(name, str) else None)
    return given, ranks


def _coder(half: str | None) -> Coder:
    """Return the coder for which float32 and float64 tensors travel in this half precision, if there is one."""

    def compress(tensor: Any) -> tuple[Any, Any]:
        if half and tensor.dtype in (tf.float32, tf.float64):
            return tf.cast(tensor, half), tensor.dtype
        return tensor, None

    def decompress(tensor: Any, dtype: Any) -> Any:
        return tensor if dtype is None else tf.cast(tensor, dtype)

    return compress, decompress


CODERS["tensorflow"] = _coder


@plain
def size_op(process_set_id: ProcessSet | int = 0, name: str | None = None) -> Any:
    """Return the number of ranks of the job (``process_set_id`` 0), or of a :class:`ProcessSet`."""
    return _ask("size_op", _set_of(process_set_id).size, name)


@plain
def rank_op(name: str | None = None) -> Any:
    """Return this process's rank in the job."""
    return _ask("rank_op", runtime.rank, name)


@plain
def local_rank_op(name: str | None = None) -> Any:
    """Return this process's rank on its host."""
    return _ask("local_rank_op", runtime.local_rank, name)


@plain
def local_size_op(name: str | None = None) -> Any:
    """Return the number of the job's processes on this host."""
    return _ask("local_size_op", runtime.local_size, name)


@plain
def process_set_included_op(process_set_id: ProcessSet | int = 0, name: str | None = None) -> Any:
    """Return 1 if this process is a member of a :class:`ProcessSet`, else 0; always 1 for 0, which means all."""
    return _ask("process_set_included_op", _set_of(process_set_id).included, name)


def _set_of(process_set: Any) -> ProcessSet:
    """Return the process set, of which only that of all ranks has a number, unlike in Horovod."""
    if isinstance(process_set, ProcessSet):
        return process_set
    if process_set in (None, 0):
        return global_process_set
    raise ConfigError(f"process_set_id must be 0 or a ProcessSet, got {process_set!r}")


def _ask(kind: str, question: Callable[[], Any], name: str | None) -> Any:
    if tf.executing_eagerly():
        return tf.constant(int(question()), tf.int32, name=name)
    refuse_xla(kind)
    (answer,) = bridge.op(lambda: [np.asarray(int(question()), np.int32)], [], [tf.int32])
    return tf.ensure_shape(answer, [], name=name)
