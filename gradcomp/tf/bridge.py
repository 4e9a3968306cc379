"""Shares arrays between TensorFlow and the engine, and translates the errors of one for the other.

Inside a tf.function TensorFlow calls Python through ``tf.numpy_function``: it lends its tensors as arrays,
and takes aligned arrays over as tensors, both without a copy (see decision 19). On a GPU it is
``tf.py_function``, which passes eager tensors both ways, also without a copy.
"""

from __future__ import annotations

import functools
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from gradcomp.core import errors
from gradcomp.core.errors import GradcompError

Array = npt.NDArray[Any]

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
