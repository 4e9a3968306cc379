"""Connects TensorFlow to the engine: checks of tensors, calls into Python, memory that both use, and errors.

In eager mode a call runs at once; inside a tf.function it is an op, and ops run in program order. Calls without a name
are matched by their order, so every rank must start them in the same order. TensorFlow orders the stateful ops of one
function among each other. But an op that uses variables (a ``tf.cond`` or an inner ``tf.function`` that reads a weight)
is ordered only among those with the same variables. Every call therefore reads and then writes one variable, the turn.
Whatever contains a call uses the turn too, at any depth, and is ordered by it.
"""

from __future__ import annotations

import functools
import inspect
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeVar, cast

import numpy as np
import numpy.typing as npt

from gradcomp.core import errors
from gradcomp.core.errors import GradcompError

_INSTALL: Final = (
    "pip install 'tensorflow[and-cuda]' for GPUs, or tensorflow-cpu, which 'gradcomp[tf-cpu]' brings"
)
try:
    import keras
    import tensorflow as tf
except ModuleNotFoundError as error:
    missing = (error.name or "").partition(".")[0]
    if missing not in ("keras", "tensorflow"):
        raise
    raise ModuleNotFoundError(
        f"gradcomp.tf needs TensorFlow 2.16 or newer with Keras 3, and {missing} is not installed: {_INSTALL}",
        name=missing,
    ) from error
if tuple(map(int, tf.__version__.split(".")[:2])) < (2, 16):
    raise ImportError(f"gradcomp.tf needs TensorFlow 2.16 or newer, and this is {tf.__version__}: {_INSTALL}")

from tensorflow.python.ops import control_flow_util  # noqa: E402 - what is missing is named first
from tensorflow.python.ops.resource_variable_ops import ResourceVariable  # noqa: E402

Array = npt.NDArray[Any]
F = TypeVar("F", bound=Callable[..., Any])

FLOATS = (tf.float16, tf.bfloat16, tf.float32, tf.float64)
INTEGERS = (tf.uint8, tf.int8, tf.uint16, tf.int16, tf.uint32, tf.int32, tf.uint64, tf.int64)
#: Dtypes that can be reduced.
REDUCIBLE = (*FLOATS, *INTEGERS, tf.bool)
#: Dtypes that can be exchanged; complex ones cannot be reduced.
VALUES = (*REDUCIBLE, tf.complex64, tf.complex128)

#: TensorFlow takes an array over as a tensor if its data begin at a multiple of this; else it copies.
ALIGNMENT_BYTES = 64
_MOST_ERRORS = 16
#: Errors that were raised inside ops, the latest last.
_raised: deque[GradcompError] = deque(maxlen=_MOST_ERRORS)
#: The variable of :func:`the_turn`.
_turn: Any = None


def dense(value: Any, dtypes: Iterable[Any] = VALUES) -> tuple[Any, str | None]:
    """Return the value as a dense tensor and None, or None and why it cannot be exchanged.

    ``dtypes`` lists the dtypes that are allowed.
    """
    if isinstance(value, tf.IndexedSlices | tf.SparseTensor | tf.RaggedTensor):
        advice = {tf.SparseTensor: "tf.sparse.to_dense", tf.RaggedTensor: "to_tensor()"}
        return None, f"not a dense tensor but {type(value).__name__}; use " + advice.get(
            type(value), "tf.convert_to_tensor"
        )
    try:
        tensor = tf.convert_to_tensor(value)
    except (TypeError, ValueError):
        return None, f"not a tensor but {type(value).__name__}"
    if tensor.dtype not in dtypes:
        return None, f"{tensor.dtype.name} cannot be {'reduced' if tensor.dtype in VALUES else 'exchanged'}"
    return tensor, None


def name_of(variable: Any) -> str:
    """Return a Keras variable's path, or a tf.Variable's name without its ``:0``."""
    return str(getattr(variable, "path", None) or variable.name.removesuffix(":0"))


def handle_of(variable: Any) -> Any:
    """Return the resource of a Keras variable or a tf.Variable."""
    return (variable.value if isinstance(variable, keras.Variable) else variable).handle


def bytes_of(value: Array) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(value).reshape(-1).view(np.uint8)


class ConfigError(tf.errors.InvalidArgumentError, errors.ConfigError):
    """A :class:`gradcomp.ConfigError` that is also the InvalidArgumentError that scripts for Horovod catch."""


class UnsupportedError(ConfigError, NotImplementedError):
    """A :class:`ConfigError` that is raised where Horovod raises NotImplementedError."""


class PlanMismatchError(tf.errors.FailedPreconditionError, errors.PlanMismatchError):
    """A :class:`gradcomp.PlanMismatchError` that is also the FailedPreconditionError that scripts for Horovod catch."""


class StateError(tf.errors.FailedPreconditionError, errors.StateError):
    """A :class:`gradcomp.StateError` that is also the FailedPreconditionError that scripts for Horovod catch."""


_OF_TENSORFLOW: dict[type[GradcompError], type[Any]] = {
    errors.ConfigError: ConfigError,
    errors.PlanMismatchError: PlanMismatchError,
    errors.StateError: StateError,
}


def of_tensorflow(error: GradcompError) -> GradcompError:
    """Return the error as the class of this module that is also TensorFlow's, if there is one; else unchanged."""
    kind = _OF_TENSORFLOW.get(type(error))
    if kind is None:
        return error
    made: GradcompError = kind(None, None, str(error))
    vars(made).update(vars(error))  # keeps its notes
    made.__cause__ = error.__cause__
    return made.with_traceback(error.__traceback__)


def op(function: Callable[..., Any], inputs: Sequence[Any], dtypes: Sequence[Any]) -> list[Any]:
    """Make an op that calls ``function`` with the values of ``inputs`` as arrays, and return its outputs.

    ``function`` returns a list of arrays, one for each dtype, or one array for one dtype. If it raises a gradcomp
    error, that is kept for :func:`typed_errors`.
    """
    return list(tf.numpy_function(_keeping_errors(function), list(inputs), list(dtypes)))


def eager_op(function: Callable[..., Any], inputs: Sequence[Any], dtypes: Sequence[Any]) -> list[Any]:
    """Make an op like :func:`op`, which calls ``function`` with eager tensors on the op's device."""
    return list(tf.py_function(_keeping_errors(function), list(inputs), list(dtypes)))


def _keeping_errors(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*values: Any) -> Any:
        try:
            return function(*values)
        except GradcompError as error:
            _raised.append(error)
            raise

    return call


@contextmanager
def typed_errors() -> Iterator[None]:
    """Raise gradcomp's error in place of the OpError that TensorFlow made of it inside an op.

    All gradcomp errors are raised as :func:`of_tensorflow` returns them.
    """
    try:
        yield
    except GradcompError as error:
        raise of_tensorflow(error)  # noqa: B904 - of_tensorflow copies the cause
    except tf.errors.OpError as error:
        text = str(error)
        for original in reversed(_raised):
            if f"{type(original).__name__}: {original}" in text:
                raise of_tensorflow(original) from error
        raise


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
    :func:`typed_errors` restores them.
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
    raise errors.ConfigError(
        f"{name}: graphs and sessions of TensorFlow 1 cannot communicate; call it in eager mode, without "
        "tf.compat.v1.disable_eager_execution() and outside of tf.Graph().as_default(), or inside a tf.function"
    )


def refuse_xla(name: str) -> None:
    """Raise ConfigError while a function is traced for XLA, whose compiled code cannot call Python."""
    if control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        raise errors.ConfigError(
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


def lent(tensor: Any) -> Array:
    """Return the values of an eager tensor without a copy (a scalar is copied); do not write to them."""
    # NumPy cannot make an array of TensorFlow's scalar if its dtype is not one of NumPy's own.
    return np.asarray(tensor.numpy() if isinstance(tensor, tf.Tensor) and not tensor.ndim else tensor)


def taken_over(array: Array) -> Any:
    """Return an eager tensor that shares an aligned array's memory; a copy if DLPack does not have the dtype."""
    try:
        return tf.experimental.dlpack.from_dlpack(array.__dlpack__())
    except BufferError:
        return tf.constant(array)


def aligned(shape: Sequence[int], dtype: npt.DTypeLike) -> Array:
    """Return an uninitialised array that :func:`taken_over` can make a tensor of without a copy."""
    kind = np.dtype(dtype)
    nbytes = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
    memory = np.empty(nbytes + ALIGNMENT_BYTES, dtype=np.uint8)
    start = -memory.ctypes.data % ALIGNMENT_BYTES
    return memory[start : start + nbytes].view(kind).reshape(shape)
