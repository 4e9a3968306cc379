"""Calls from TensorFlow into Python: at once in eager mode, as ops in program order inside tf.function.

Calls without a name are matched by their order, so every rank must begin them in the same one. TensorFlow orders the
stateful ops of one function among each other, but an op that uses variables (a ``tf.cond`` or an inner ``tf.function``
that reads a weight) only among those with the same variables. Every call therefore reads and then writes one variable,
the turn: whatever contains a call uses it too, at any depth, and is put in its place.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt
import tensorflow as tf
from tensorflow.python.ops import control_flow_util
from tensorflow.python.ops.resource_variable_ops import ResourceVariable

from gradcomp.core.errors import ConfigError, GradcompError
from gradcomp.tf.bridge import lent, of_tensorflow, op

Array = npt.NDArray[Any]
F = TypeVar("F", bound=Callable[..., Any])

_turn: Any = None


def plain(function: F) -> F:
    """Keep AutoGraph, which rewrites what a tf.function calls, out of ``function``, what it calls and its errors.

    Whatever users call is plain, so here the core's errors become TensorFlow's too.
    """

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        try:
            return function(*arguments, **named)
        except GradcompError as error:
            typed = of_tensorflow(error)
            typed.ag_pass_through = True  # type: ignore[attr-defined]  # AutoGraph would raise another class
            raise typed  # noqa: B904 - it has the cause of the one that it stands for

    made = tf.autograph.experimental.do_not_convert(call)
    # A function that is an argument is unwrapped by TensorFlow, and then rewritten after all.
    made.__signature__ = inspect.signature(function)
    del made.__wrapped__
    return cast(F, made)


def run(
    name: str, function: Callable[..., Sequence[Array]], tensors: Sequence[Any], dtypes: Sequence[Any]
) -> Any:
    """``function`` of the tensors' values as arrays, which it must not write; it returns one array per dtype.

    In eager mode its errors reach the caller as they are. Inside a tf.function TensorFlow raises an error of its own,
    whose text has the class and the message; :func:`gradcomp.tf.bridge.typed_errors` gives them back.
    """
    if tf.executing_eagerly():
        results = function(*map(lent, tensors))
        return [tf.constant(array, dtype) for array, dtype in zip(results, dtypes, strict=True)]
    refuse_graph(name)
    turn = the_turn()

    def later(_: Array, *values: Array) -> list[Array]:
        # A scalar may come as a NumPy scalar. An output of its own: the turn waits for it where there is no other.
        return [*function(*(np.asarray(value) for value in values)), np.asarray(0)]

    # Given the turn's value as an input, the op also waits inside a while loop, where there are no control edges.
    outputs = op(later, [turn.read_value(), *tensors], [*dtypes, tf.int64])
    with tf.control_dependencies(outputs):
        turn.assign_add(1)
    return outputs[:-1]


def refuse_graph(name: str) -> None:
    """ConfigError where a graph is built whose ops cannot communicate: one of TensorFlow 1, and one for XLA."""
    refuse_xla(name)
    with tf.init_scope():
        if tf.executing_eagerly():
            return
    raise ConfigError(
        f"{name}: graphs and sessions of TensorFlow 1 cannot communicate; call it in eager mode, without "
        "tf.compat.v1.disable_eager_execution() and outside of tf.Graph().as_default(), or inside a tf.function"
    )


def refuse_xla(name: str) -> None:
    """ConfigError while a function is traced for XLA, whose compiled code cannot call out."""
    if control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        raise ConfigError(
            f"{name}: a function compiled with jit_compile=True cannot communicate; set jit_compile=False in "
            "tf.function or model.compile, and compile the computation alone if it is worth it"
        )


def the_turn() -> Any:
    """The variable that every call reads and then writes: who wants to be put in its place does so too."""
    global _turn
    if _turn is None:
        with tf.init_scope(), tf.device("CPU:0"):
            # tf.Variable would tell the function that is being traced, which would then be traced twice.
            _turn = ResourceVariable(0, dtype=tf.int64, trainable=False, name="gradcomp_turn")
    return _turn
