"""Calls from TensorFlow into Python: at once in eager mode, as ops in program order inside tf.function.

Calls without a name are matched by their order, so every rank must start them in the same order. TensorFlow
orders the stateful ops of one function among each other. But an op that uses variables (a ``tf.cond`` or an
inner ``tf.function`` that reads a weight) is ordered only among those with the same variables. Every call
therefore reads and then writes one variable, the turn. Whatever contains a call uses the turn too, at any
depth, and is ordered by it.
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
    """Exclude ``function`` from AutoGraph, which rewrites functions that a tf.function calls.

    This covers the functions that it calls and its errors. All functions that users call are plain, so this
    is also where the core's errors become TensorFlow's.
    """

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        try:
            return function(*arguments, **named)
        except GradcompError as error:
            typed = of_tensorflow(error)
            typed.ag_pass_through = True  # type: ignore[attr-defined]  # AutoGraph would raise another class
            raise typed  # noqa: B904 - of_tensorflow copies the cause

    made = tf.autograph.experimental.do_not_convert(call)
    # TensorFlow unwraps a function that is passed as an argument, and would then rewrite it after all.
    made.__signature__ = inspect.signature(function)
    del made.__wrapped__
    return cast(F, made)


def run(
    name: str, function: Callable[..., Sequence[Array]], tensors: Sequence[Any], dtypes: Sequence[Any]
) -> Any:
    """Call ``function`` with the tensors' values as arrays; it returns one array per dtype.

    ``function`` must not write to its arguments. In eager mode errors reach the caller unchanged. Inside a
    tf.function TensorFlow raises an error of its own, whose text has the class and the message;
    :func:`gradcomp.tf.bridge.typed_errors` restores them.
    """
    if tf.executing_eagerly():
        results = function(*map(lent, tensors))
        return [tf.constant(array, dtype) for array, dtype in zip(results, dtypes, strict=True)]
    refuse_graph(name)
    turn = the_turn()

    def later(_: Array, *values: Array) -> list[Array]:
        # TensorFlow may pass a scalar tensor as a NumPy scalar. The turn needs an output to wait for, so one is added.
        return [*function(*(np.asarray(value) for value in values)), np.asarray(0)]

    # The turn's value is an input, so the op also waits inside a while loop, which has no control edges.
    outputs = op(later, [turn.read_value(), *tensors], [*dtypes, tf.int64])
    with tf.control_dependencies(outputs):
        turn.assign_add(1)
    return outputs[:-1]


def refuse_graph(name: str) -> None:
    """Raise ConfigError in a graph whose ops cannot communicate: one of TensorFlow 1, and one for XLA."""
    refuse_xla(name)
    with tf.init_scope():
        if tf.executing_eagerly():
            return
    raise ConfigError(
        f"{name}: graphs and sessions of TensorFlow 1 cannot communicate; call it in eager mode, without "
        "tf.compat.v1.disable_eager_execution() and outside of tf.Graph().as_default(), or inside a tf.function"
    )


def refuse_xla(name: str) -> None:
    """Raise ConfigError while a function is traced for XLA, whose compiled code cannot call Python."""
    if control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        raise ConfigError(
            f"{name}: a function compiled with jit_compile=True cannot communicate; set jit_compile=False in "
            "tf.function or model.compile, and compile the computation alone if it is worth it"
        )


def the_turn() -> Any:
    """Return the variable that every call reads and then writes, and that orders other ops in the same way."""
    global _turn
    if _turn is None:
        with tf.init_scope(), tf.device("CPU:0"):
            # A function that is being traced notices a new tf.Variable, and would then be traced twice.
            _turn = ResourceVariable(0, dtype=tf.int64, trainable=False, name="gradcomp_turn")
    return _turn
