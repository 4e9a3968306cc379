"""Memory of gradients and means: arrays that TensorFlow lends and takes over, or tensors on a GPU."""

from __future__ import annotations

import ctypes
import logging
import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import tensorflow as tf

from gradcomp.core.errors import ConfigError, StateError
from gradcomp.kernels import devices
from gradcomp.kernels.devices import HOST, Device
from gradcomp.tf import bridge
from gradcomp.tf.bridge import Array, aligned, lent, taken_over

logger = logging.getLogger("gradcomp")

_MOST_ARRAYS = 3
_SOMEWHERE = np.zeros(1)
_probe = [np.empty(0)]
#: The ``sys.getrefcount`` of an array that only a list holds.
_IDLE = sys.getrefcount(_probe[0])
_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype = ctypes.c_void_p
_pointer_of.argtypes = (ctypes.py_object, ctypes.c_char_p)

Shapes = Sequence[Sequence[int]]


class HostMemory:
    """Converts tensors to values that the engine reads and writes: arrays that TensorFlow lends and takes over.

    Arrays of means are used again once TensorFlow no longer refers to them. A variable that was assigned a mean may go
    on using the array's memory, so the next step may need another array.
    """

    #: The device whose kernels work on this memory.
    device = HOST

    def __init__(self, shapes: Shapes, dtypes: Sequence[Any]) -> None:
        self._forms = [(shape, dtype.as_numpy_dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
        self._arrays: dict[int, list[Array]] = {}

    def op(
        self, function: Callable[..., Any], head: Sequence[Any], tensors: Sequence[Any], dtypes: Sequence[Any]
    ) -> list[Any]:
        """Return the outputs of an op in the traced function that calls ``function``.

        Its arguments are the head, as arrays, and the tensors, as values. It returns a list of values of
        these dtypes, or an array for one dtype. See :func:`gradcomp.tf.bridge.op`.
        """
        with tf.device("CPU:0"):
            return bridge.op(function, [*head, *tensors], dtypes)

    def value(self, given: Any) -> Any:
        """Return the value of an op's argument, or of a tensor in eager mode; do not write to it."""
        return lent(given)

    def address(self, value: Any) -> int:
        """Return a value's address, valid while the value is referred to; never 0: an empty one has any address."""
        return int(value.ctypes.data or _SOMEWHERE.ctypes.data)

    def allocate(self, layer: int) -> Any:
        """Return a value for the layer's mean that nothing else uses."""
        arrays = self._arrays.setdefault(layer, [])
        for number in range(len(arrays)):
            if sys.getrefcount(arrays[number]) == _IDLE:
                return arrays[number]
        fresh = aligned(*self._forms[layer])
        arrays[:] = [*arrays[-(_MOST_ARRAYS - 1) :], fresh]
        return fresh

    def tensor(self, value: Any) -> Any:
        """Return the tensor that a value becomes in eager mode."""
        return taken_over(value)


class DeviceMemory:
    """Does as :class:`HostMemory` does; values are eager tensors of a GPU, all in TensorFlow's own memory."""

    def __init__(self, name: str, device: Device, shapes: Shapes, dtypes: Sequence[Any]) -> None:
        self.device = device
        self._name = name  # TensorFlow's
        self._dtypes = dtypes
        with tf.init_scope():
            with tf.device("CPU:0"):
                self._shapes = [tf.constant(shape, tf.int32) for shape in shapes]
            with tf.device(name):
                self._zeros = {dtype: tf.zeros((), dtype) for dtype in set(dtypes)}

    def op(
        self, function: Callable[..., Any], head: Sequence[Any], tensors: Sequence[Any], dtypes: Sequence[Any]
    ) -> list[Any]:
        """Make two calls: one on the host, which takes the head if there is one, then one on the GPU.

        So the head is not copied to the GPU and back. The turn keeps the calls of another step from running
        between the two.
        """
        if not head:
            with tf.device(self._name):
                return bridge.eager_op(function, tensors, dtypes)
        taken: list[tuple[Any, ...]] = []

        def take(*values: Any) -> Any:
            taken[:] = [values]
            return np.zeros((), dtype=np.int64)

        def call(_: Any, *values: Any) -> Any:
            return function(*taken.pop(), *values)

        with tf.device("CPU:0"):
            token = bridge.op(take, head, [tf.int64])[0]
        with tf.device(self._name):
            return bridge.eager_op(call, [token, *tensors], dtypes)

    def value(self, given: Any) -> Any:
        """Return the tensor, copied to this GPU if it was computed elsewhere."""
        if given.backing_device == self._name:
            return given
        with tf.device(self._name):
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
        with tf.device(self._name):
            return tf.fill(self._shapes[layer], self._zeros[self._dtypes[layer]])

    def tensor(self, value: Any) -> Any:
        return value


Memory = HostMemory | DeviceMemory


def place_of(variables: Sequence[Any]) -> tuple[str, Device] | None:
    """Return the GPU on which all variables are: TensorFlow's name for it, and gradcomp's device.

    It is None if their gradients are exchanged on the host. The host exchanges for variables on the CPU. It also does,
    with a warning that says why, for variables on several devices, which TensorFlow's copies bring together, and for a
    GPU that gradcomp cannot use. TensorFlow has chosen the device, not the script, so an error would break a program
    that works.
    """
    if not tf.config.list_logical_devices("GPU"):
        return None
    with tf.init_scope():
        tensors = [tf.convert_to_tensor(variable) for variable in variables]
    names = sorted({tensor.backing_device for tensor in tensors})
    filled = [tensor for tensor in tensors if tensor.shape.num_elements()]
    if not filled or not any(map(_is_gpu, names)):
        return None
    try:
        if len(names) > 1:
            raise ConfigError(f"the variables are on {', '.join(names)}")
        return names[0], devices.cuda_at(address_of(filled[0]))
    except ConfigError as error:
        _warn(f"gradients are exchanged on the CPU: {error}")
        return None


def _is_gpu(name: str) -> bool:
    return bool(tf.DeviceSpec.from_string(name).device_type == "GPU")


@cache
def _warn(text: str) -> None:
    """Warn once for each text, however many tapes and optimizers there are."""
    logger.warning("%s", text)


class _DLTensor(ctypes.Structure):
    """The struct DLTensor of dlpack.h."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


def address_of(tensor: Any) -> int:
    """Return the address of an eager tensor's memory, valid while the tensor is referred to; 0 if it has none.

    DLPack gives the address. On a GPU TensorFlow first waits for all work that its stream holds by then: the
    kernels that compute the tensor, and those that still use what was in its memory before. So the memory may
    be read and written at once, on any stream, without an event.
    """
    capsule = tf.experimental.dlpack.to_dlpack(tensor)
    described = _DLTensor.from_address(_pointer_of(capsule, b"dltensor"))
    stride = 1
    for dimension in reversed(range(described.ndim if described.strides else 0)):
        length = described.shape[dimension]
        if length > 1 and described.strides[dimension] != stride:
            raise StateError(f"a tensor of shape {tensor.shape} is not contiguous in memory")
        stride *= length
    return int(described.data + described.byte_offset) if described.data else 0
