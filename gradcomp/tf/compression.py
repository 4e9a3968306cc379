"""``compression=`` of a collective on TensorFlow's tensors."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from gradcomp.compress.quantise.cast import CODERS, Coder
from gradcomp.job import coding


def coder_of(compression: Any) -> tuple[Coder, str | None]:
    """Return the coder of a ``compression=`` argument, see :func:`gradcomp.job.coding.coder_of`.

    float32 and float64 tensors travel in the half precision that it names.
    """
    return coding.coder_of(compression, _to, (_keep, _restore))


def _keep(tensor: Any) -> tuple[Any, Any]:
    return tensor, None


def _restore(tensor: Any, dtype: Any) -> Any:
    return tensor if dtype is None else tf.cast(tensor, dtype)


def _to(half: str) -> Coder:
    def compress(tensor: Any) -> tuple[Any, Any]:
        if tensor.dtype in (tf.float32, tf.float64):
            return tf.cast(tensor, half), tensor.dtype
        return tensor, None

    return compress, _restore


CODERS["tensorflow"] = _to
