"""The memory in which gradients are submitted and means returned: the host's, or a GPU's."""

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
    """Converts tensors to values that the engine reads and writes: arrays, or eager tensors on the GPU."""

    @property
    def device(self) -> Device:
        """The device whose kernels work on this memory."""
        ...

    def op(
        self, function: Callable[..., Any], head: Sequence[Any], tensors: Sequence[Any], dtypes: Sequence[Any]
    ) -> list[Any]:
        """Return the outputs of an op in the traced function that calls ``function``.

        Its arguments are the head, as arrays, and the tensors, as values. It returns a list of values of
        these dtypes, or an array for one dtype. See :func:`gradcomp.tf.bridge.op`.
        """
        ...

    def value(self, given: Any) -> Any:
        """Return the value of an op's argument, or of a tensor in eager mode; do not write to it."""
        ...

    def address(self, value: Any) -> int:
        """Return a value's address, valid while the value is referred to; never 0."""
        ...

    def allocate(self, layer: int) -> Any:
        """Return a value for the layer's mean that nothing else uses."""
        ...

    def tensor(self, value: Any) -> Any:
        """Return the tensor that a value becomes in eager mode."""
        ...


class HostMemory:
    """Arrays that TensorFlow lends and takes over, see :class:`Memory`."""

    device = HOST

    def __init__(self, shapes: Sequence[Sequence[int]], dtypes: Sequence[Any]) -> None:
        self._pool = bridge.Pool(shapes, [dtype.as_numpy_dtype for dtype in dtypes])

    def op(
        self, function: Callable[..., Any], head: Sequence[Any], tensors: Sequence[Any], dtypes: Sequence[Any]
    ) -> list[Any]:
        with tf.device("CPU:0"):
            return bridge.op(function, [*head, *tensors], dtypes)

    def value(self, given: Any) -> Any:
        return bridge.lent(given)

    def address(self, value: Any) -> int:
        """Return the array's address; any address for an empty one, which may have no memory."""
        return int(value.ctypes.data or _SOMEWHERE.ctypes.data)

    def allocate(self, layer: int) -> Any:
        return self._pool.take(layer)

    def tensor(self, value: Any) -> Any:
        return bridge.taken_over(value)


class DeviceMemory:
    """Tensors of a GPU, all in TensorFlow's own memory, see :class:`Memory`."""

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
        """Make two calls: one on the host, which takes the head if there is one, then one on the GPU.

        So the head is not copied to the GPU and back. The turn keeps the calls of another step from running
        between the two.
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
        """Return the tensor, copied to this GPU if it was computed elsewhere."""
        if given.backing_device == self._place:
            return given
        with tf.device(self._place):
            return tf.identity(given)

    def address(self, value: Any) -> int:
        """Return the tensor's address; some address on the device for an empty one, which may have no memory."""
        found = address_of(value) or address_of(self._zeros[value.dtype])
        driver = self.device.driver
        if driver is not None and not driver.reaches(found):
            raise StateError(f"a tensor on {value.backing_device} is not in the memory of {self.device.name}")
        return found

    def allocate(self, layer: int) -> Any:
        """Allocate by ``tf.fill``, because TensorFlow's ``Empty`` does not exist for all dtypes."""
        with tf.device(self._place):
            return tf.fill(self._shapes[layer], self._zeros[self._dtypes[layer]])

    def tensor(self, value: Any) -> Any:
        return value
