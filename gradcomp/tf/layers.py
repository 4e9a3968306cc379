"""Layer specs of variables, and the devices and addresses of their tensors."""

from __future__ import annotations

import ctypes
import itertools
import logging
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import tensorflow as tf

from gradcomp.core.errors import ConfigError, StateError
from gradcomp.core.layers import Kind, LayerSpec
from gradcomp.kernels import devices
from gradcomp.kernels.devices import Device
from gradcomp.tf.bridge import name_of

_NORM = re.compile(r"(^|[/_])(norm|ln|bn|layer_?norm|batch_?norm|group_?norm|rms_?norm)", re.IGNORECASE)

logger = logging.getLogger("gradcomp")
_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype = ctypes.c_void_p
_pointer_of.argtypes = (ctypes.py_object, ctypes.c_char_p)


def specs(variables: Sequence[Any], names: Sequence[str] | None = None) -> list[LayerSpec]:
    """Return the layers of these variables, in order, with unique names.

    ``names`` are their names, if not the variables' own. Raises ConfigError for variables that cannot be
    exchanged.
    """
    layers: dict[str, LayerSpec] = {}
    for number, variable in enumerate(variables):
        if not hasattr(variable, "assign"):
            raise ConfigError(f"expected variables, got {type(variable).__name__}")
        given = name_of(variable) if names is None else names[number]
        # Plain variables may share a name: the second one's is name_1.
        others = (f"{given}_{i}" for i in itertools.count(1))
        name = next(n for n in itertools.chain([given], others) if n not in layers)
        shape = tuple(variable.shape)
        if None in shape:
            raise ConfigError(f"layer {name!r} has no fixed shape: {variable.shape}")
        dtype = getattr(variable.dtype, "name", str(variable.dtype))
        if dtype.startswith("complex"):
            raise ConfigError(
                f"layer {name!r} is complex; keep its real and imaginary parts in two variables"
            )
        layers[name] = LayerSpec(name, matrix_view(shape), dtype, _kind(name, len(shape)))
    return list(layers.values())


def matrix_view(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the matrix that compressors see.

    They take the first dimension as rows. TensorFlow's convolutions are (height, width, in, out), and
    attention has (in, heads, size). Of all ways to cut the list of dimensions in two, this is the one with
    the smallest sum of rows and columns.
    """
    if len(shape) <= 2 or 0 in shape:
        return shape
    cuts = [(math.prod(shape[:cut]), math.prod(shape[cut:])) for cut in range(1, len(shape))]
    return min(cuts, key=sum)


def _kind(name: str, dimensions: int) -> Kind:
    last = name.rpartition("/")[2]
    if last.startswith("bias") or last.endswith("bias"):
        return "bias"
    if dimensions <= 1 and (last in ("gamma", "beta") or _NORM.search(name)):
        return "norm"
    return "embedding" if "emb" in name.lower() else "weight"


@dataclass(frozen=True)
class Place:
    """A GPU: TensorFlow's name for it, and gradcomp's device."""

    name: str
    device: Device


def place_of(variables: Sequence[Any]) -> Place | None:
    """Return the GPU on which all variables are, or None if their gradients are exchanged on the host.

    The host exchanges for variables on the CPU. It also does, with a warning that says why, for variables on
    several devices, which TensorFlow's copies bring together, and for a GPU that gradcomp cannot use.
    TensorFlow has chosen the device, not the script, so an error would break a program that works.
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
        return Place(names[0], devices.cuda_at(address_of(filled[0])))
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
