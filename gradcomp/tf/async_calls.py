"""Collectives of a tf.function: one op starts a call, and another op waits for it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import tensorflow as tf

from gradcomp.compress.quantise.cast import CODERS, Coder
from gradcomp.core.errors import GradcompError
from gradcomp.job import reduce_op
from gradcomp.job.call_matching import Reply
from gradcomp.job.collectives import Descriptor, refuse
from gradcomp.job.launch import Ranks
from gradcomp.job.process_sets import Members, members
from gradcomp.job.reduce_op import ScaledOp
from gradcomp.tf.bridge import VALUES, Array, dense, lent, op
from gradcomp.tf.ordered import refuse_graph, the_turn

#: Capacity of a queue, which must have one: more calls than a program ever makes.
_MOST_TOKENS = 1 << 30
#: Ranks and name -> the latest call with them from a tf.function.
_latest: WeakValueDictionary[tuple[Ranks, str], Reply[Any]] = WeakValueDictionary()


def given_tensors(tensors: Any, dtypes: Iterable[Any] = VALUES) -> tuple[list[Any], str | None]:
    """Return a group as tensors, and why it cannot be exchanged, or None; ``dtypes`` are those allowed."""
    if not isinstance(tensors, list | tuple):
        return [], f"not a list of tensors but {type(tensors).__name__}"
    found, problem = [], None
    for place, value in enumerate(tensors):
        tensor, wrong = dense(value, dtypes)
        found.append(tensor)
        if wrong and problem is None:
            problem = wrong if len(tensors) == 1 else f"tensor {place}: {wrong}"
    return found, problem


def agreed(
    kind: str,
    tensors: Sequence[Any],
    name: str | None,
    process_set: Members,
    problem: str | None,
    how: ScaledOp | None = None,
) -> Ranks:
    """Return the ranks that take part; raise a problem on all of them, also while a function is traced."""
    ranks = members(process_set)
    for tensor in [] if problem else tensors:
        # If the number of dimensions is not known yet, the call checks it when it runs.
        shape = (0,) if tensor.shape.rank is None else tuple(size or 0 for size in tensor.shape)
        dtype = tensor.dtype
        problem = problem or Descriptor(kind, ranks, name, dtype.name, dtype.size, shape, how).problem
    if problem is not None:
        refuse(kind, ranks, problem, name if isinstance(name, str) else None)
    return ranks


def descriptors(
    kind: str,
    values: Sequence[Array],
    name: str | None,
    ranks: Ranks,
    how: ScaledOp | None = None,
    root: int | None = None,
) -> list[Descriptor]:
    return [
        Descriptor(kind, ranks, name, value.dtype.name, value.itemsize, value.shape, how, root)
        for value in values
    ]


def coder_of(compression: Any) -> tuple[Coder, str | None]:
    """Return the coder of a ``compression=`` argument, see :func:`gradcomp.job.reduce_op.coder_of`.

    float32 and float64 tensors travel in the half precision that it names.
    """
    return reduce_op.coder_of(compression, _to, (_keep, _restore))


def _keep(tensor: Any) -> tuple[Any, Any]:
    return tensor, None


def _restore(tensor: Any, dtype: Any) -> Any:
    return tensor if dtype is None else tf.cast(tensor, dtype)


def _to(half: str) -> Coder:
    def compress(tensor: Any) -> tuple[Any, Any]:
        if tensor.dtype in (tf.float32, tf.float64):
            return tf.cast(tensor, half), tensor.dtype
        return tensor, None

    return compress, _restore


CODERS["tensorflow"] = _to


class Called(NamedTuple):
    """The kind of a collective, the user's name for the call, and the ranks that take part."""

    kind: str
    name: str | None
    ranks: Ranks


@dataclass(frozen=True)
class Begun:
    """A call that has started; ``arrays`` makes TensorFlow's arrays of its result."""

    reply: Reply[Any]
    arrays: Callable[[Any], list[Array]]

    def results(self) -> list[Array]:
        """Wait for the arrays, or raise the call's error."""
        return self.arrays(self.reply.result())


def call(
    called: Called, begin: Callable[..., Begun], tensors: Sequence[Any], dtypes: Sequence[Any]
) -> list[Any]:
    """Start the call that ``begin`` makes of the tensors' values as arrays, wait, and return its results.

    ``begin`` must not write to the arrays. In eager mode errors reach the caller unchanged. Inside a
    tf.function TensorFlow raises an error of its own, whose text has the class and the message;
    :func:`gradcomp.tf.bridge.typed_errors` restores them.
    """
    if tf.executing_eagerly():
        results = begin(*map(lent, tensors)).results()
        return [tf.constant(array, dtype) for array, dtype in zip(results, dtypes, strict=True)]
    refuse_graph(called.kind)
    site = _Site(begin, None if called.name is None else (called.ranks, called.name))
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
        begun = self._begin(*map(np.asarray, values))
        if self._key is not None:
            _latest[self._key] = begun.reply
        number = next(self._numbers)
        self._begun[number] = begun
        begun.reply.when_ended(self._add_token)
        return np.asarray(number)

    def end(self, number: Array, _: Array) -> list[Array]:
        """Return the call's results.

        It waits only if it took the token of another call, as happens in a loop or before an error.
        """
        return self._begun.pop(int(number)).results()

    def _add_token(self) -> None:
        self.tokens.enqueue(self._token)
