"""Reductions of the user's own tensors over ranks, with Horovod's semantics, in eager mode and inside tf.function.

Each call costs one small round in which the ranks compare what they call; then the data move. An allreduce of
up to 4,096 bytes (16,384 / N from 5 ranks on) needs the small round alone, of 48 + 4,096 bytes to every rank.
d is the size of the tensors on the wire in bytes, N the number of ranks. In a world of one nothing moves.

``op`` is Average (default), Sum, Min, Max, Product, or Adasum. ``prescale_factor`` is applied before it,
``postscale_factor`` after it. Tensors are dense, of any shape, of float16, bfloat16, float32, float64, bool
or any integer dtype; results have the tensor's dtype. float16 and bfloat16 are combined in float32, integers
in int64: a sum that does not fit wraps, an average or a scaled value loses its fraction. On bool, Sum and Max
are "or", Product and Min "and". ``compression`` is ``Compression.none``, ``.fp16`` or ``.bf16``, the dtype in
which float32 and float64 travel, or an object with functions ``compress`` and ``decompress``.

``name`` tells a call from others. ``process_set`` names the ranks that take part, if not all (see
:class:`ProcessSet`). ``device_dense``, ``device_sparse`` and ``ignore_name_scope`` are Horovod's and have no
effect: data are exchanged in host memory, and names have no scope.

All of them raise StateError before ``init``; on every rank ConfigError for an argument that cannot be
exchanged or a name whose last call has not ended, and PlanMismatchError if shape, dtype, op or factors
differ; and TransportError if a rank is dead or does not call in time. An error while a tf.function runs
arrives as one of TensorFlow's, whose text contains these.

Inside a tf.function calls start in program order and wait for nothing but their tensors, so ranks may make
calls with names in any order there, too. A branch, a loop or an inner function with calls ends before the
next call starts. All ranks must take a branch that contains a call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from gradcomp.compress import Compression
from gradcomp.core.errors import ConfigError
from gradcomp.job.process_sets import Members
from gradcomp.job.reduce_op import Average, ReduceOp, ScaledOp, Sum, scaled_op_of
from gradcomp.tf.bridge import UnsupportedError
from gradcomp.tf.compression import coder_of
from gradcomp.tf.differentiable import gather_tensors, reduce_tensors, reducescatter_tensors
from gradcomp.tf.ordered import plain
from gradcomp.tf.tensors import REDUCIBLE
from gradcomp.tf.wire import agreed, given_tensors

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
    how, problem = scaled_op_of(average, op, prescale_factor, postscale_factor)
    return _allreduce([tensor], name, compression, how, problem, process_set)[0]


@plain
def grouped_allreduce(
    tensors: Sequence[Any],
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
    how, problem = scaled_op_of(average, op, prescale_factor, postscale_factor)
    return _allreduce(tensors, name, compression, how, problem, process_set)


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
    how, problem = scaled_op_of(None, op, prescale_factor, postscale_factor)
    return _reducescatter([tensor], name, compression, how, problem, process_set)[0]


@plain
def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",  # noqa: ARG001
    compression: Any = Compression.none,
    op: ReduceOp = Average,
    process_set: Members = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
) -> list[Any]:
    """Reduce each tensor as :func:`reducescatter` does, in one message for each dtype."""
    how, problem = scaled_op_of(None, op, prescale_factor, postscale_factor)
    return _reducescatter(tensors, name, compression, how, problem, process_set)


def _allreduce(
    tensors: Any,
    name: str | None,
    compression: Any,
    how: ScaledOp,
    problem: str | None,
    process_set: Members,
) -> list[Any]:
    slices = {}
    if isinstance(tensors, list | tuple):
        slices = {place: given for place, given in enumerate(tensors) if isinstance(given, tf.IndexedSlices)}
        tensors = [given.values if place in slices else given for place, given in enumerate(tensors)]
    given, wrong = given_tensors(tensors, REDUCIBLE)
    if slices and (how.op not in (Average, Sum) or how.scales):
        wrong = wrong or _UNSUPPORTED
    (compress, decompress), unknown = coder_of(compression)
    try:
        ranks = agreed("allreduce", given, name, process_set, problem or wrong or unknown, how)
    except ConfigError as error:
        raise UnsupportedError(None, None, str(error)) if wrong is _UNSUPPORTED else error  # noqa: B904
    places = [place for place in range(len(given)) if place not in slices]
    results: list[Any] = [None] * len(given)
    if places:
        coded, contexts = zip(*(compress(given[place]) for place in places), strict=True)
        reduced = reduce_tensors(coded, name, how, ranks)
        for place, tensor, context in zip(places, reduced, contexts, strict=True):
            results[place] = decompress(tensor, context)
    if slices:
        parts = [*(given[place] for place in slices), *(each.indices for each in slices.values())]
        # Only one call at a time may have a name, and the dense tensors' call has this one.
        gathered = gather_tensors(parts, f"{name}.slices" if places and name else name, ranks)
        rows, indices = gathered[: len(slices)], gathered[len(slices) :]
        for (place, each), values, index in zip(slices.items(), rows, indices, strict=True):
            averages = how.op is Average and len(ranks) > 1
            scaled = values / tf.cast(len(ranks), values.dtype) if averages else values
            results[place] = tf.IndexedSlices(scaled, index, each.dense_shape)
    return results


def _reducescatter(
    tensors: Any,
    name: str | None,
    compression: Any,
    how: ScaledOp,
    problem: str | None,
    process_set: Members,
) -> list[Any]:
    given, wrong = given_tensors(tensors, REDUCIBLE)
    (compress, decompress), unknown = coder_of(compression)
    ranks = agreed("reducescatter", given, name, process_set, problem or wrong or unknown, how)
    if not given:
        return []
    coded, contexts = zip(*map(compress, given), strict=True)
    reduced = reducescatter_tensors(coded, name, how, ranks)
    return [decompress(tensor, context) for tensor, context in zip(reduced, contexts, strict=True)]
