"""Imports TensorFlow and Keras before anything else does, and names both of TensorFlow's builds if that fails."""

from __future__ import annotations

from typing import Final

_OLDEST: Final = (2, 16)
_INSTALL: Final = (
    "pip install 'tensorflow[and-cuda]' for GPUs, or tensorflow-cpu, which 'gradcomp[tf-cpu]' brings"
)


def new_enough(version: str) -> bool:
    """Return True if this version of TensorFlow, such as "2.16.1", has Keras 3."""
    return tuple(int(part) for part in version.split(".")[:2]) >= _OLDEST


try:
    import keras  # noqa: F401
    import tensorflow as tf
except ModuleNotFoundError as error:
    missing = (error.name or "").partition(".")[0]
    if missing not in ("keras", "tensorflow"):
        raise
    raise ModuleNotFoundError(
        f"gradcomp.tf needs TensorFlow 2.16 or newer with Keras 3, and {missing} is not installed: {_INSTALL}",
        name=missing,
    ) from error
if not new_enough(tf.__version__):
    raise ImportError(f"gradcomp.tf needs TensorFlow 2.16 or newer, and this is {tf.__version__}: {_INSTALL}")
