"""Collectives that move the user's tensors: begun by one op of a tf.function, and waited for by others.

An op that waits would keep one of TensorFlow's threads, of which there may be one only, while the call that another
rank waits for has not begun. So the op that begins a call returns at once, and the end of the call puts a token into a
queue of TensorFlow's, whose dequeue keeps no thread. Calls begin in program order; they end in any.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import tensorflow as tf

from gradcomp.core.errors import GradcompError
from gradcomp.job.network import Ranks
from gradcomp.job.reply import Reply
from gradcomp.tf.bridge import lent, op
from gradcomp.tf.ordered import refuse_graph, the_turn
from gradcomp.tf.tensors import Array

#: Of a queue, which must have a bound: more than there will ever be.
_MOST_TOKENS = 1 << 30

#: The latest call from a tf.function by its ranks and name.
_latest: WeakValueDictionary[tuple[Ranks, str], Reply[Any]] = WeakValueDictionary()


class Called(NamedTuple):
    """Which collective, with the user's name for it, and the ranks that take part."""

    kind: str
    name: str | None
    ranks: Ranks


@dataclass(frozen=True)
class Begun:
    """A call under way; ``arrays``: what its result is to TensorFlow."""

    reply: Reply[Any]
    arrays: Callable[[Any], list[Array]]

    def results(self) -> list[Array]:
        """Wait for the arrays, or raise the call's error."""
        return self.arrays(self.reply.result())


def call(
    called: Called, begin: Callable[..., Begun], tensors: Sequence[Any], dtypes: Sequence[Any]
) -> list[Any]:
    """The results of the call that ``begin`` makes of the tensors' values as arrays, which it must not write.

    In eager mode its errors reach the caller as they are. Inside a tf.function TensorFlow raises an error of its own,
    whose text has the class and the message; :func:`gradcomp.tf.bridge.typed_errors` gives them back.
    """
    if tf.executing_eagerly():
        results = begin(*map(lent, tensors)).results()
        return [tf.constant(array, dtype) for array, dtype in zip(results, dtypes, strict=True)]
    refuse_graph(called.kind)
    site = _Site(begin, None if called.name is None else (called.ranks, called.name))
    turn = the_turn()
    with tf.device("CPU:0"):
        # Given the turn's value as an input, the op also waits inside a while loop, where there are no control edges.
        (number,) = op(site.begin, [turn.read_value(), *tensors], [tf.int64])
        with tf.control_dependencies([number]):
            turn.assign_add(1)
            token = site.tokens.dequeue()
        outputs = op(site.end, [number, token], dtypes)
    manager = getattr(outputs[0].graph, "experimental_acd_manager", None)
    if manager is not None:
        # They run even if nobody needs the outputs, and do not wait for what else the function does in Python.
        manager.run_independently(number.op)
        manager.run_independently(outputs[0].op)
    return outputs


class _Site:
    """A place in a graph that makes a call; several may be under way where it is in a loop."""

    def __init__(self, begin: Callable[..., Begun], key: tuple[Ranks, str] | None) -> None:
        self._begin = begin
        self._key = key
        self._begun: dict[int, Begun] = {}
        self._numbers = itertools.count()
        with tf.init_scope(), tf.device("CPU:0"):
            #: One for each call that has ended.
            self.tokens = tf.queue.FIFOQueue(_MOST_TOKENS, [tf.int64], shapes=[[]])
            self._token = tf.constant(0, tf.int64)

    def begin(self, _: Array, *values: Array) -> Array:
        """Begin a call; its number."""
        if self._key is not None and (earlier := _latest.get(self._key)) is not None:
            # In a loop, or of another place with the same name, which is free again then. Its own op raises its error.
            with suppress(GradcompError):
                earlier.result()
        # A scalar may come as a NumPy scalar.
        begun = self._begin(*map(np.asarray, values))
        if self._key is not None:
            _latest[self._key] = begun.reply
        number = next(self._numbers)
        self._begun[number] = begun
        begun.reply.when_ended(self._add_token)
        return np.asarray(number)

    def end(self, number: Array, _: Array) -> list[Array]:
        """The call's results. It waits only where a token of another call, in a loop or before an error, was taken."""
        return self._begun.pop(int(number)).results()

    def _add_token(self) -> None:
        self.tokens.enqueue(self._token)
