"""The memory in which gradients are handed in and means come out: the host's, or a GPU's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from gradcomp.core.errors import StateError
from gradcomp.kernels.devices import HOST, Device
from gradcomp.tf import bridge
from gradcomp.tf.devices import Place, address_of

_SOMEWHERE = np.zeros(1)


class Memory(Protocol):
    """What an exchange asks of it. *Values* are what it makes of tensors: arrays, or eager tensors on the GPU."""

    @property
    def device(self) -> Device:
        """Whose kernels work on it."""
        ...

    def op(
        self, function: Callable[..., Any], head: Sequence[Any], tensors: Sequence[Any], dtypes: Sequence[Any]
    ) -> list[Any]:
        """An op of the function that is being traced: ``function`` of the head, as arrays, and of the tensors.

        It returns a list of values of these dtypes, or an array of one. See :func:`gradcomp.tf.bridge.op`.
        """
        ...

    def value(self, given: Any) -> Any:
        """What an op's function was given, or a tensor in eager mode, as a value; not to be written."""
        ...

    def address(self, value: Any) -> int:
        """Where a value lies, for as long as it is referred to; never 0."""
        ...

    def allocate(self, layer: int) -> Any:
        """A value for the layer's mean, which nobody else uses."""
        ...

    def tensor(self, value: Any) -> Any:
        """In eager mode, the tensor that a value becomes."""
        ...


class HostMemory:
    """Arrays, which TensorFlow lends and takes over. See :class:`Memory`."""

    device = HOST

    def __init__(self, shapes: Sequence[Sequence[int]], dtypes: Sequence[Any]) -> None:
        self._pool = bridge.Pool(shapes, [dtype.as_numpy_dtype for dtype in dtypes])

    def op(
        self, function: Callable[..., Any], head: Sequence[Any], tensors: Sequence[Any], dtypes: Sequence[Any]
    ) -> list[Any]:
        """One call, which copies nothing."""
        with tf.device("CPU:0"):
            return bridge.op(function, [*head, *tensors], dtypes)

    def value(self, given: Any) -> Any:
        """Lent; of a scalar a copy."""
        return bridge.lent(given)

    def address(self, value: Any) -> int:
        """The array's; of an empty one, which may have no memory, any."""
        return int(value.ctypes.data or _SOMEWHERE.ctypes.data)

    def allocate(self, layer: int) -> Any:
        """From a pool."""
        return self._pool.take(layer)

    def tensor(self, value: Any) -> Any:
        """Without a copy."""
        return bridge.taken_over(value)


class DeviceMemory:
    """Tensors of a GPU, all of them TensorFlow's own. See :class:`Memory`."""

    def __init__(self, place: Place, shapes: Sequence[Sequence[int]], dtypes: Sequence[Any]) -> None:
        self.device = place.device
        self._place = place.name
        self._dtypes = dtypes
        with tf.init_scope():
            with tf.device("CPU:0"):
                self._shapes = [tf.constant(shape, tf.int32) for shape in shapes]
            with tf.device(self._place):
                self._zeros = {dtype: tf.zeros((), dtype) for dtype in set(dtypes)}

    def op(
        self, function: Callable[..., Any], head: Sequence[Any], tensors: Sequence[Any], dtypes: Sequence[Any]
    ) -> list[Any]:
        """Two calls: one on the host, which takes the head if there is one, then one on the GPU.

        The head does not cross to the GPU and back. The turn keeps the two of another step from coming in between.
        """
        if not head:
            with tf.device(self._place):
                return bridge.eager_op(function, tensors, dtypes)
        taken: list[tuple[Any, ...]] = []

        def take(*values: Any) -> Any:
            taken[:] = [values]
            return np.zeros((), dtype=np.int64)

        def call(_: Any, *values: Any) -> Any:
            return function(*taken.pop(), *values)

        with tf.device("CPU:0"):
            token = bridge.op(take, head, [tf.int64])[0]
        with tf.device(self._place):
            return bridge.eager_op(call, [token, *tensors], dtypes)

    def value(self, given: Any) -> Any:
        """The tensor, brought here if it was computed elsewhere."""
        if given.backing_device == self._place:
            return given
        with tf.device(self._place):
            return tf.identity(given)

    def address(self, value: Any) -> int:
        """The tensor's; of an empty one, which may have no memory, some address on the device."""
        found = address_of(value) or address_of(self._zeros[value.dtype])
        driver = self.device.driver
        if driver is not None and not driver.reaches(found):
            raise StateError(f"a tensor on {value.backing_device} is not in the memory of {self.device.name}")
        return found

    def allocate(self, layer: int) -> Any:
        """A new tensor, filled, as TensorFlow's ``Empty`` is not there for all dtypes."""
        with tf.device(self._place):
            return tf.fill(self._shapes[layer], self._zeros[self._dtypes[layer]])

    def tensor(self, value: Any) -> Any:
        """Itself."""
        return value
