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
    """Converts tensors to values that the engine reads and writes: arrays that share memory with TensorFlow's tensors.

    Arrays of means are reused once TensorFlow no longer refers to them. A variable that was assigned a mean may still
    use the array's memory, so the next step may need another array.
    """

    #: The device whose kernels work on this memory.
    device = HOST

    def __init__(self, shapes: Shapes, dtypes: Sequence[Any]) -> None:
        self._forms = [(shape, dtype.as_numpy_dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
        self._arrays: dict[int, list[Array]] = {}

    def op(
        self, function: Callable[..., Any], head: Sequence[Any], tensors: Sequence[Any], dtypes: Sequence[Any]
    ) -> list[Any]:
        """Add an op that calls ``function`` to the traced function, and return its outputs.

        ``function`` gets the head as arrays and the tensors as values. It returns a list of values of these
        dtypes, or an array for one dtype. See :func:`gradcomp.tf.bridge.op`.
        """
        with tf.device("CPU:0"):
            return bridge.op(function, [*head, *tensors], dtypes)

    def value(self, given: Any) -> Any:
        """Return the value of an op's argument, or of an eager tensor; the caller must not write to it."""
        return lent(given)

    def address(self, value: Any) -> int:
        """Return a value's address, valid while the value is referred to; any address but 0 for an empty value."""
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
        """Return an eager tensor that takes over a value's memory."""
        return taken_over(value)


class DeviceMemory:
    """Has the methods of :class:`HostMemory`; its values are eager tensors on a GPU, in TensorFlow's memory."""

    def __init__(self, name: str, device: Device, shapes: Shapes, dtypes: Sequence[Any]) -> None:
        self.device = device
        self._name = name  # the name that TensorFlow gives the device
        self._dtypes = dtypes
        with tf.init_scope():
            with tf.device("CPU:0"):
                self._shapes = [tf.constant(shape, tf.int32) for shape in shapes]
            with tf.device(name):
                self._zeros = {dtype: tf.zeros((), dtype) for dtype in set(dtypes)}

    def op(
        self, function: Callable[..., Any], head: Sequence[Any], tensors: Sequence[Any], dtypes: Sequence[Any]
    ) -> list[Any]:
        """Add an op on the host that reads the head, if there is a head, and an op on the GPU that calls ``function``.

        With two ops the head is not copied to the GPU and back. The turn variable (see `gradcomp.tf.bridge`) orders
        all ops, so no op of another step runs between the two.
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
        """Return the tensor's address; for an empty tensor, which may have no memory, any address on the device."""
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
    """Return TensorFlow's name and gradcomp's device of the GPU that holds all variables; None for the host.

    Gradients of variables on the CPU are exchanged on the host. So are, with a warning that gives the reason, those of
    variables on several devices, which TensorFlow copies to the host, and those on a GPU that gradcomp cannot use. This
    is not an error, because TensorFlow, not the script, has chosen the device.
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

    DLPack gives the address. On a GPU TensorFlow first waits for all work on its stream: the kernels that
    compute the tensor, and the kernels that still use the previous contents of its memory. The memory may
    therefore be read and written immediately, on any stream, without an event.
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
