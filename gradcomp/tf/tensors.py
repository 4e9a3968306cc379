"""Properties of tensors that decide whether and how they can be exchanged."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

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
