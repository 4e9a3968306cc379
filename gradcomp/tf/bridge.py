"""Arrays that TensorFlow and the engine share, and how the errors of one reach the other.

Inside a tf.function TensorFlow calls Python through ``tf.numpy_function``: it lends its tensors as arrays, and takes
aligned arrays over as tensors, both without a copy (see decision 19). On a GPU it is ``tf.py_function``, which
passes eager tensors both ways, without a copy either.
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

#: TensorFlow takes an array over as a tensor where its data begin at a multiple of this; else it copies.
ALIGNMENT_BYTES = 64

_MOST_ARRAYS = 3
_MOST_ERRORS = 16

#: What was raised inside an op, the latest last.
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
    """The error as one of TensorFlow's too, of the class that Horovod raises in its place."""
    kind = _OF_TENSORFLOW.get(type(error))
    if kind is None:
        return error
    made: GradcompError = kind(None, None, str(error))
    vars(made).update(vars(error))  # notes
    made.__cause__ = error.__cause__
    return made.with_traceback(error.__traceback__)


def op(function: Callable[..., Any], inputs: Sequence[Any], dtypes: Sequence[Any]) -> list[Any]:
    """An op of the function that is being traced, which calls ``function`` with the inputs' values as arrays.

    It may return a list of arrays, one for each dtype. A gradcomp error is kept for :func:`typed_errors`.
    """
    return list(tf.numpy_function(_keeping_errors(function), list(inputs), list(dtypes)))


def eager_op(function: Callable[..., Any], inputs: Sequence[Any], dtypes: Sequence[Any]) -> list[Any]:
    """As :func:`op`, with eager tensors in place of arrays, on the device on which the op runs."""
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
    """Raise gradcomp's errors as what they are, where TensorFlow has made errors of its own of them."""
    try:
        yield
    except GradcompError as error:
        raise of_tensorflow(error)  # noqa: B904 - it has the cause of the one that it stands for
    except tf.errors.OpError as error:
        text = str(error)
        for original in reversed(_raised):
            if f"{type(original).__name__}: {original}" in text:
                raise of_tensorflow(original) from error
        raise


def lent(tensor: Any) -> Array:
    """The values of a tensor in eager mode, where they lie, of a scalar a copy; not to be written."""
    # NumPy cannot ask TensorFlow for an array of a scalar whose dtype is none of NumPy's own.
    return np.asarray(tensor.numpy() if isinstance(tensor, tf.Tensor) and not tensor.ndim else tensor)


def taken_over(array: Array) -> Any:
    """An eager tensor of an aligned array, which it keeps; a copy for dtypes that DLPack does not have."""
    try:
        return tf.experimental.dlpack.from_dlpack(array.__dlpack__())
    except BufferError:
        return tf.constant(array)


def aligned(shape: Sequence[int], dtype: npt.DTypeLike) -> Array:
    """An array that TensorFlow takes over without a copy; its values are arbitrary."""
    kind = np.dtype(dtype)
    nbytes = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
    room = np.empty(nbytes + ALIGNMENT_BYTES, dtype=np.uint8)
    start = -room.ctypes.data % ALIGNMENT_BYTES
    return room[start : start + nbytes].view(kind).reshape(shape)


class Pool:
    """Arrays for the means of layers, used again once TensorFlow has let go of them.

    A variable that was assigned a mean may go on living in its array, so two steps may need two.
    """

    def __init__(self, shapes: Sequence[Sequence[int]], dtypes: Sequence[npt.DTypeLike]) -> None:
        self._forms = list(zip(shapes, dtypes, strict=True))
        self._arrays: dict[int, list[Array]] = {}

    def take(self, layer: int) -> Array:
        """An array for the layer's mean that nobody else refers to."""
        arrays = self._arrays.setdefault(layer, [])
        for number in range(len(arrays)):
            if sys.getrefcount(arrays[number]) == _IDLE:
                return arrays[number]
        fresh = aligned(*self._forms[layer])
        arrays[:] = [*arrays[-(_MOST_ARRAYS - 1) :], fresh]
        return fresh


_probe = [np.empty(0)]
#: What ``sys.getrefcount`` says of an array that only a list holds.
_IDLE = sys.getrefcount(_probe[0])
