"""Collectives on groups of tensors, with Horovod's gradients; the public functions document each.

In a tf.function one op starts a call, and another op waits for it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import tensorflow as tf

from gradcomp.core.errors import ConfigError, GradcompError
from gradcomp.job import collectives, runtime
from gradcomp.job.call_matching import Reply
from gradcomp.job.collectives import Descriptor, splits_of
from gradcomp.job.launch import Ranks
from gradcomp.job.reduce_op import Average, ReduceOp, ScaledOp, shares
from gradcomp.tf.bridge import Array, bytes_of, lent, op, plain, refuse_graph, the_turn

Tensors = Sequence[Any]
#: A call that has started: its reply, and a function that makes TensorFlow's arrays of the reply's result.
Begun = tuple[Reply[Any], Callable[[Any], list[Array]]]

#: Capacity of a queue, which must have one: more calls than a program ever makes.
_MOST_TOKENS = 1 << 30
#: Ranks and name -> the latest call with them from a tf.function.
_latest: WeakValueDictionary[tuple[Ranks, str], Reply[Any]] = WeakValueDictionary()


def _described(call: Descriptor, values: Sequence[Array]) -> list[Descriptor]:
    """Return the descriptor of each tensor of a call; ``call`` has what they have in common."""
    return [replace(call, dtype=v.dtype.name, itemsize=v.itemsize, shape=v.shape) for v in values]


def reduce_tensors(tensors: Tensors, name: str | None, how: ScaledOp, ranks: Ranks) -> list[Any]:
    """Allreduce a group; the gradient is the allreduce of the gradients, with the same op and factors."""
    call = Descriptor("allreduce", ranks, name, how=how)

    def reduce(*values: Array) -> Begun:
        flats = [value.flatten() for value in values]
        reply = collectives.allreduce(_described(call, values), flats)
        return reply, lambda _: [flat.reshape(value.shape) for flat, value in zip(flats, values, strict=True)]

    def backward(gradients: list[Any], _: Any) -> list[Any]:
        return reduce_tensors(gradients, gradient_name(name), how, ranks)

    return _op(call, reduce, tensors, [tensor.shape for tensor in tensors], backward)[0]


def reducescatter_tensors(tensors: Tensors, name: str | None, how: ScaledOp, ranks: Ranks) -> list[Any]:
    """Reduce-scatter a group.

    The gradient of a row is that of the rank that holds it, times the factors, and times N for a sum.
    """
    call = Descriptor("reducescatter", ranks, name, how=how)
    place, size = ranks.index(runtime.rank()), len(ranks)

    def scatter(*values: Array) -> Begun:
        described = _described(call, values)
        flats = [np.ascontiguousarray(value).reshape(-1) for value in values]
        return collectives.reducescatter(described, flats), lambda parts: [
            part.reshape(shares(each.rows, size)[place], *each.shape[1:])
            for part, each in zip(parts, described, strict=True)
        ]

    def backward(gradients: list[Any], _: Any) -> list[Any]:
        if how.op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
            raise ConfigError(f"reducescatter: op={how.op.name} has no gradient; use Average or Sum")
        factor = how.prescale * how.postscale * (size if how.op is ReduceOp.SUM else 1)
        scaled = [gradient * tf.cast(factor, gradient.dtype) for gradient in gradients]
        return gather_tensors(scaled, gradient_name(name), ranks)

    rows = [tensor.shape[0] if tensor.shape.rank else None for tensor in tensors]
    shapes = [
        _with_rows(tensor, None if count is None else shares(count, size)[place])
        for tensor, count in zip(tensors, rows, strict=True)
    ]
    return _op(call, scatter, tensors, shapes, backward)[0]


def gather_tensors(tensors: Tensors, name: str | None, ranks: Ranks) -> list[Any]:
    """Allgather a group; the gradient of a rank's rows is the mean over ranks of their gradients."""
    call = Descriptor("allgather", ranks, name)
    place = ranks.index(runtime.rank())

    def gather(*values: Array) -> Begun:
        def arrays(found: list[tuple[Array, list[int]]]) -> list[Array]:
            wholes = [_rows_of(whole, v, rows) for (whole, rows), v in zip(found, values, strict=True)]
            return [*wholes, np.asarray([sum(rows[:place]) for _, rows in found], np.int64)]

        return collectives.allgather(_described(call, values), list(map(bytes_of, values))), arrays

    def backward(gradients: list[Any], starts: Any) -> list[Any]:
        means = _means(gradients, gradient_name(name), ranks)
        places = [place for place, tensor in enumerate(tensors) if _has_gradient(tensor)]
        lengths = [tf.shape(tensors[place], out_type=tf.int64)[0] for place in places]
        return [
            mean[starts[place] : starts[place] + length]
            for mean, place, length in zip(means, places, lengths, strict=True)
        ]

    shapes = [_with_rows(tensor, None) for tensor in tensors]
    return _op(call, gather, tensors, shapes, backward, tf.int64)[0]


def broadcast_tensor(tensor: Any, root_rank: int, name: str | None, ranks: Ranks) -> Any:
    """Broadcast a tensor; the root's gradient is the mean over ranks of the gradients, the others' is zero."""
    call = Descriptor("broadcast", ranks, name, root=root_rank)

    def send(value: Array) -> Begun:
        buffer = bytes_of(value).copy()
        reply = collectives.broadcast(_described(call, [value])[0], buffer)
        return reply, lambda _: [buffer.view(value.dtype).reshape(value.shape)]

    def backward(gradients: list[Any], _: Any) -> list[Any]:
        (mean,) = _means(gradients, gradient_name(name), ranks)
        return [mean if runtime.rank() == root_rank else tf.zeros_like(mean)]

    (output,), _ = _op(call, send, [tensor], [tensor.shape], backward)
    return output


def swap_rows(tensor: Any, splits: Any, name: str | None, ranks: Ranks) -> tuple[Any, Any]:
    """Exchange rows all to all; returns the rows, and the number from each rank.

    The gradient of a row goes back to the rank that sent the row.
    """
    call = Descriptor("alltoall", ranks, name)

    def swap(value: Array, *given: Array) -> Begun:
        (described,) = _described(call, [value])
        parts, problem = splits_of(described, given[0] if given else None)

        def arrays(found: tuple[Array, list[int]]) -> list[Array]:
            whole, counts = found
            return [_rows_of(whole, value, counts), np.asarray(counts, np.int32)]

        return collectives.alltoall(described, bytes_of(value), parts, problem), arrays

    def backward(gradients: list[Any], received: Any) -> list[Any]:
        return [swap_rows(gradients[0], received, gradient_name(name), ranks)[0]]

    more = [] if splits is None else [splits]
    shapes = [_with_rows(tensor, None), tf.TensorShape([len(ranks)])]
    (rows,), received = _op(call, swap, [tensor], shapes, backward, tf.int32, more)
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
    call: Descriptor,
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
    from the extra output. In a world of one the tensors are returned, without the extra output, unless they are scaled
    or there are more inputs.
    """
    if len(call.ranks) == 1 and not more and not (call.how is not None and call.how.scales):
        return [tf.identity(tensor) for tensor in tensors], None
    dtypes = [tensor.dtype for tensor in tensors] + ([] if extra is None else [extra])
    places = [place for place, tensor in enumerate(tensors) if _has_gradient(tensor)]

    def forward(*given: Any) -> tuple[list[Any], Callable[..., list[Any]]]:
        outputs = _call(call, begin, [*given, *more], dtypes)
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


def _rows_of(data: Array, like: Array, rows: Sequence[int]) -> Array:
    return data.view(like.dtype).reshape(sum(rows), *like.shape[1:])


def _with_rows(tensor: Any, rows: int | None) -> Any:
    """Return the static shape of ``rows`` rows of ``tensor``, as far as it is known."""
    return tf.TensorShape(None) if tensor.shape.rank is None else tf.TensorShape([rows, *tensor.shape[1:]])


def _call(
    call: Descriptor, begin: Callable[..., Begun], tensors: Tensors, dtypes: Sequence[Any]
) -> list[Any]:
    """Start the call that ``begin`` makes of the tensors' values as arrays, wait, and return its results.

    ``begin`` must not write to the arrays. In eager mode errors reach the caller unchanged. Inside a
    tf.function TensorFlow raises an error of its own, whose text has the class and the message;
    :func:`gradcomp.tf.bridge.typed_errors` restores them.
    """
    if tf.executing_eagerly():
        reply, arrays = begin(*map(lent, tensors))
        results = arrays(reply.result())
        return [tf.constant(array, dtype) for array, dtype in zip(results, dtypes, strict=True)]
    refuse_graph(call.kind)
    site = _Site(begin, None if call.name is None else (call.ranks, call.name))
    turn = the_turn()
    with tf.device("CPU:0"):
        # The turn's value is an input, so the op also waits inside a while loop, which has no control edges.
        (number,) = op(site.begin, [turn.read_value(), *tensors], [tf.int64])
        with tf.control_dependencies([number]):
            turn.assign_add(1)
            token = site.tokens.dequeue()
        outputs = op(site.end, [number, token], dtypes)
    manager = getattr(outputs[0].graph, "experimental_acd_manager", None)
    if manager is not None:
        # The ops run even if nothing uses the outputs, and do not wait for other Python ops of the function.
        manager.run_independently(number.op)
        manager.run_independently(outputs[0].op)
    return outputs


class _Site:
    """A place in a graph that makes a call; in a loop several of its calls may run at a time."""

    def __init__(self, begin: Callable[..., Begun], key: tuple[Ranks, str] | None) -> None:
        self._begin = begin
        self._key = key
        self._begun: dict[int, Begun] = {}
        self._numbers = itertools.count()
        with tf.init_scope(), tf.device("CPU:0"):
            #: Holds one token for each call that has ended.
            self.tokens = tf.queue.FIFOQueue(_MOST_TOKENS, [tf.int64], shapes=[[]])
            self._token = tf.constant(0, tf.int64)

    def begin(self, _: Array, *values: Array) -> Array:
        """Start a call, and return its number."""
        if self._key is not None and (earlier := _latest.get(self._key)) is not None:
            # The earlier call is of this loop, or of another place with the same name. The name is free when it has
            # ended. Its own op raises its error.
            with suppress(GradcompError):
                earlier.result()
        # TensorFlow may pass a scalar tensor as a NumPy scalar.
        reply, arrays = self._begin(*map(np.asarray, values))
        if self._key is not None:
            _latest[self._key] = reply
        number = next(self._numbers)
        self._begun[number] = reply, arrays
        reply.when_ended(self._add_token)
        return np.asarray(number)

    def end(self, number: Array, _: Array) -> list[Array]:
        """Return the call's results.

        It waits only if it took the token of another call, as happens in a loop or before an error.
        """
        reply, arrays = self._begun.pop(int(number))
        return arrays(reply.result())

    def _add_token(self) -> None:
        self.tokens.enqueue(self._token)
