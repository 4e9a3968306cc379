"""Shares arrays between TensorFlow and the engine, and translates the errors of one for the other."""

from __future__ import annotations

import functools
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from gradcomp.core import errors
from gradcomp.core.errors import GradcompError

Array = npt.NDArray[Any]

FLOATS = (tf.float16, tf.bfloat16, tf.float32, tf.float64)
INTEGERS = (tf.uint8, tf.int8, tf.uint16, tf.int16, tf.uint32, tf.int32, tf.uint64, tf.int64)
#: Dtypes that can be reduced.
REDUCIBLE = (*FLOATS, *INTEGERS, tf.bool)
#: Dtypes that can be moved.
VALUES = (*REDUCIBLE, tf.complex64, tf.complex128)


def dense(value: Any, dtypes: Iterable[Any] = VALUES) -> tuple[Any, str | None]:
    """Return the value as a tensor, or None and why its values cannot be exchanged.

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
    """Return a Keras variable's path, or a tf.Variable's name without the number of its output."""
    return str(getattr(variable, "path", None) or variable.name.removesuffix(":0"))


def bytes_of(value: Array) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(value).reshape(-1).view(np.uint8)


#: TensorFlow takes an array over as a tensor if its data begin at a multiple of this; else it copies.
ALIGNMENT_BYTES = 64

_MOST_ARRAYS = 3
_MOST_ERRORS = 16

#: Errors that were raised inside ops, the latest last.
_raised: deque[GradcompError] = deque(maxlen=_MOST_ERRORS)


class ConfigError(tf.errors.InvalidArgumentError, errors.ConfigError):
    """A :class:`gradcomp.ConfigError` that scripts for Horovod catch as TensorFlow's."""


class UnsupportedError(ConfigError, NotImplementedError):
    """A :class:`ConfigError` for what Horovod calls not implemented."""


class PlanMismatchError(tf.errors.FailedPreconditionError, errors.PlanMismatchError):
    """A :class:`gradcomp.PlanMismatchError` that scripts for Horovod catch as TensorFlow's."""


class StateError(tf.errors.FailedPreconditionError, errors.StateError):
    """A :class:`gradcomp.StateError` that scripts for Horovod catch as TensorFlow's."""


_OF_TENSORFLOW: dict[type[GradcompError], type[Any]] = {
    errors.ConfigError: ConfigError,
    errors.PlanMismatchError: PlanMismatchError,
    errors.StateError: StateError,
}


def of_tensorflow(error: GradcompError) -> GradcompError:
    """Return the error as one that is also TensorFlow's, of the class that Horovod raises in its place."""
    kind = _OF_TENSORFLOW.get(type(error))
    if kind is None:
        return error
    made: GradcompError = kind(None, None, str(error))
    vars(made).update(vars(error))  # keeps its notes
    made.__cause__ = error.__cause__
    return made.with_traceback(error.__traceback__)


def op(function: Callable[..., Any], inputs: Sequence[Any], dtypes: Sequence[Any]) -> list[Any]:
    """Return the outputs of an op in the traced function that calls ``function`` with the inputs' values as arrays.

    ``function`` may return a list of arrays, one for each dtype. A gradcomp error is kept for
    :func:`typed_errors`.
    """
    return list(tf.numpy_function(_keeping_errors(function), list(inputs), list(dtypes)))


def eager_op(function: Callable[..., Any], inputs: Sequence[Any], dtypes: Sequence[Any]) -> list[Any]:
    """Make an op as :func:`op` does, with eager tensors in place of arrays, on the op's device."""
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
    """Restore gradcomp's errors, with their types, from the errors that TensorFlow made of them."""
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


def lent(tensor: Any) -> Array:
    """Return the values of an eager tensor without a copy (a scalar is copied); do not write to them."""
    # NumPy cannot make an array of TensorFlow's scalar if its dtype is not one of NumPy's own.
    return np.asarray(tensor.numpy() if isinstance(tensor, tf.Tensor) and not tensor.ndim else tensor)


def taken_over(array: Array) -> Any:
    """Return an eager tensor that takes an aligned array over; dtypes that DLPack does not have are copied."""
    try:
        return tf.experimental.dlpack.from_dlpack(array.__dlpack__())
    except BufferError:
        return tf.constant(array)


def aligned(shape: Sequence[int], dtype: npt.DTypeLike) -> Array:
    """Return an uninitialised array that TensorFlow takes over without a copy."""
    kind = np.dtype(dtype)
    nbytes = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
    room = np.empty(nbytes + ALIGNMENT_BYTES, dtype=np.uint8)
    start = -room.ctypes.data % ALIGNMENT_BYTES
    return room[start : start + nbytes].view(kind).reshape(shape)


class Pool:
    """Arrays for the means of layers, reused once TensorFlow no longer refers to them.

    A variable that was assigned a mean may keep its values in that array, so two steps may need two arrays.
    """

    def __init__(self, shapes: Sequence[Sequence[int]], dtypes: Sequence[npt.DTypeLike]) -> None:
        self._forms = list(zip(shapes, dtypes, strict=True))
        self._arrays: dict[int, list[Array]] = {}

    def take(self, layer: int) -> Array:
        """Return an array for the layer's mean to which nothing else refers."""
        arrays = self._arrays.setdefault(layer, [])
        for number in range(len(arrays)):
            if sys.getrefcount(arrays[number]) == _IDLE:
                return arrays[number]
        fresh = aligned(*self._forms[layer])
        arrays[:] = [*arrays[-(_MOST_ARRAYS - 1) :], fresh]
        return fresh


_probe = [np.empty(0)]
#: The ``sys.getrefcount`` of an array that only a list holds.
_IDLE = sys.getrefcount(_probe[0])
