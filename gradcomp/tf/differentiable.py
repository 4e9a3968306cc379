"""Collectives on groups of tensors as ops, with Horovod's gradients; the public functions document each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from gradcomp.core.errors import ConfigError
from gradcomp.job import collectives, runtime
from gradcomp.job.collectives import splits_of
from gradcomp.job.launch import Ranks
from gradcomp.job.reduce_op import Average, ReduceOp, ScaledOp, shares
from gradcomp.tf.async_calls import Begun, Called, call, descriptors
from gradcomp.tf.bridge import Array, bytes_of
from gradcomp.tf.ordered import plain

Tensors = Sequence[Any]


def reduce_tensors(tensors: Tensors, name: str | None, how: ScaledOp, ranks: Ranks) -> list[Any]:
    """Allreduce a group; the gradient is the allreduce of the gradients, with the same op and factors."""
    if len(ranks) == 1 and not how.scales:
        return [tf.identity(tensor) for tensor in tensors]

    def reduce(*values: Array) -> Begun:
        flats = [value.flatten() for value in values]
        return Begun(
            collectives.allreduce(descriptors("allreduce", values, name, ranks, how), flats),
            lambda _: [flat.reshape(value.shape) for flat, value in zip(flats, values, strict=True)],
        )

    def backward(gradients: list[Any], _: Any) -> list[Any]:
        return reduce_tensors(gradients, gradient_name(name), how, ranks)

    outputs, _ = _op(
        Called("allreduce", name, ranks), reduce, tensors, [tensor.shape for tensor in tensors], backward
    )
    return outputs


def reducescatter_tensors(tensors: Tensors, name: str | None, how: ScaledOp, ranks: Ranks) -> list[Any]:
    """Reduce-scatter a group.

    The gradient of a row is that of the rank that holds it, times the factors, and times N for a sum.
    """
    if len(ranks) == 1 and not how.scales:
        return [tf.identity(tensor) for tensor in tensors]
    place, size = ranks.index(runtime.rank()), len(ranks)

    def scatter(*values: Array) -> Begun:
        called = descriptors("reducescatter", values, name, ranks, how)
        flats = [np.ascontiguousarray(value).reshape(-1) for value in values]
        return Begun(
            collectives.reducescatter(called, flats),
            lambda parts: [
                part.reshape(shares(each.rows, size)[place], *each.shape[1:])
                for part, each in zip(parts, called, strict=True)
            ],
        )

    def backward(gradients: list[Any], _: Any) -> list[Any]:
        if how.op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
            raise ConfigError(f"reducescatter: op={how.op.name} has no gradient; use Average or Sum")
        factor = how.prescale * how.postscale * (size if how.op is ReduceOp.SUM else 1)
        scaled = [gradient * tf.cast(factor, gradient.dtype) for gradient in gradients]
        return gather_tensors(scaled, gradient_name(name), ranks)

    rows = [None if t.shape.rank is None or t.shape[0] is None else t.shape[0] for t in tensors]
    shapes = [
        _with_rows(tensor, None if count is None else shares(count, size)[place])
        for tensor, count in zip(tensors, rows, strict=True)
    ]
    outputs, _ = _op(Called("reducescatter", name, ranks), scatter, tensors, shapes, backward)
    return outputs


def gather_tensors(tensors: Tensors, name: str | None, ranks: Ranks) -> list[Any]:
    """Allgather a group; the gradient of a rank's rows is the mean over ranks of their gradients."""
    if len(ranks) == 1:
        return [tf.identity(tensor) for tensor in tensors]
    place = ranks.index(runtime.rank())

    def gather(*values: Array) -> Begun:
        called = descriptors("allgather", values, name, ranks)
        return Begun(
            collectives.allgather(called, [bytes_of(value) for value in values]),
            lambda found: [
                *(
                    _rows_of(whole, value, sum(rows))
                    for (whole, rows), value in zip(found, values, strict=True)
                ),
                np.asarray([sum(rows[:place]) for _, rows in found], np.int64),
            ],
        )

    def backward(gradients: list[Any], starts: Any) -> list[Any]:
        means = _means(gradients, gradient_name(name), ranks)
        places = [place for place, tensor in enumerate(tensors) if _has_gradient(tensor)]
        lengths = [tf.shape(tensors[place], out_type=tf.int64)[0] for place in places]
        return [
            mean[starts[place] : starts[place] + length]
            for mean, place, length in zip(means, places, lengths, strict=True)
        ]

    shapes = [_with_rows(tensor, None) for tensor in tensors]
    outputs, _ = _op(Called("allgather", name, ranks), gather, tensors, shapes, backward, tf.int64)
    return outputs


def broadcast_tensor(tensor: Any, root_rank: int, name: str | None, ranks: Ranks) -> Any:
    """Broadcast a tensor; the root's gradient is the mean over ranks of the gradients, the others' is zero."""
    if len(ranks) == 1:
        return tf.identity(tensor)

    def send(value: Array) -> Begun:
        buffer = bytes_of(value).copy()
        (called,) = descriptors("broadcast", [value], name, ranks, root=root_rank)
        return Begun(
            collectives.broadcast(called, buffer),
            lambda _: [buffer.view(value.dtype).reshape(value.shape)],
        )

    def backward(gradients: list[Any], _: Any) -> list[Any]:
        (mean,) = _means(gradients, gradient_name(name), ranks)
        return [mean if runtime.rank() == root_rank else tf.zeros_like(mean)]

    (output,), _ = _op(Called("broadcast", name, ranks), send, [tensor], [tensor.shape], backward)
    return output


def swap_rows(tensor: Any, splits: Any, name: str | None, ranks: Ranks) -> tuple[Any, Any]:
    """Exchange rows all to all; returns the rows, and the number from each rank.

    The gradient of a row goes back to the rank that sent the row.
    """
    if len(ranks) == 1 and splits is None:
        return tf.identity(tensor), None

    def swap(value: Array, *given: Array) -> Begun:
        (called,) = descriptors("alltoall", [value], name, ranks)
        parts, problem = splits_of(called, given[0] if given else None)

        def rows(found: tuple[Array, list[int]]) -> list[Array]:
            whole, counts = found
            return [_rows_of(whole, value, sum(counts)), np.asarray(counts, np.int32)]

        return Begun(collectives.alltoall(called, bytes_of(value), parts, problem), rows)

    def backward(gradients: list[Any], received: Any) -> list[Any]:
        return [swap_rows(gradients[0], received, gradient_name(name), ranks)[0]]

    more = [] if splits is None else [splits]
    (rows,), received = _op(
        Called("alltoall", name, ranks), swap, [tensor], [_with_rows(tensor, None)], backward, tf.int32, more
    )
    received.set_shape([len(ranks)])
    return rows, received


def gradient_name(name: str | None) -> str | None:
    return f"{name}.gradient" if isinstance(name, str) else None


def _means(gradients: list[Any], name: str | None, ranks: Ranks) -> list[Any]:
    """Average over ranks; complex numbers by their real and imaginary parts."""
    parts = [tf.stack([tf.math.real(g), tf.math.imag(g)]) if g.dtype.is_complex else g for g in gradients]
    means = reduce_tensors(parts, name, ScaledOp(Average), ranks)
    return [
        tf.complex(mean[0], mean[1]) if gradient.dtype.is_complex else mean
        for mean, gradient in zip(means, gradients, strict=True)
    ]


def _has_gradient(tensor: Any) -> bool:
    return bool(tensor.dtype.is_floating or tensor.dtype.is_complex)


def _op(
    called: Called,
    begin: Callable[..., Begun],
    tensors: Tensors,
    shapes: Sequence[Any],
    backward: Callable[[list[Any], Any], list[Any]],
    extra: Any = None,
    more: Sequence[Any] = (),
) -> tuple[list[Any], Any]:
    """Make a call with one output for each tensor of the group, of its dtype and of these static shapes.

    ``extra`` is the dtype of a further output, without a gradient, and ``more`` are inputs without a
    gradient. ``backward`` computes the gradients of the inputs that have one, from those of their outputs and
    from the extra output.
    """
    dtypes = [tensor.dtype for tensor in tensors] + ([] if extra is None else [extra])
    places = [place for place, tensor in enumerate(tensors) if _has_gradient(tensor)]

    def forward(*given: Any) -> tuple[list[Any], Callable[..., list[Any]]]:
        outputs = call(called, begin, [*given, *more], dtypes)
        for output, shape in zip(outputs, shapes, strict=False):
            output.set_shape(shape)

        @plain
        def grad(*gradients: Any) -> list[Any]:
            # The gradient of an unused output may be a zero of another dtype.
            dense = [tf.cast(tf.convert_to_tensor(gradients[place]), dtypes[place]) for place in places]
            found = dict(zip(places, backward(dense, outputs[-1]) if places else [], strict=True))
            return [found.get(place) for place in range(len(tensors))]

        return outputs, grad

    results = tf.custom_gradient(forward)(*tensors)
    return (list(results), None) if extra is None else (list(results[:-1]), results[-1])


def _rows_of(data: Array, like: Array, rows: int) -> Array:
    return data.view(like.dtype).reshape(rows, *like.shape[1:])


def _with_rows(tensor: Any, rows: int | None) -> Any:
    """Return the static shape of so many rows of ``tensor``, as far as it is known."""
    return tf.TensorShape(None) if tensor.shape.rank is None else tf.TensorShape([rows, *tensor.shape[1:]])
