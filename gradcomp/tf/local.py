"""Variables whose gradients stay local, and Horovod's arguments and names that have no effect or no counterpart."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import keras
import tensorflow as tf

from gradcomp.compress import Compressor, Policy
from gradcomp.compress.registry import from_string
from gradcomp.core.errors import ConfigError, MissingNameError
from gradcomp.core.registry import CONTRIB, contributed

ELASTIC = "a job that loses a rank ends; start a new one, which resumes by BackupAndRestore, or by save() and load()"
_HELPER = "a helper of Horovod's own modules"
_MODULE = "modules inside the package are gradcomp's own; import names from gradcomp.tf"
#: Names in horovod.tensorflow.
TF: Mapping[str, str] = {
    "BroadcastGlobalVariablesHook": "a hook for sessions of TensorFlow 1; call broadcast_variables(model.variables)",
    "elastic": ELASTIC,
    **dict.fromkeys(
        (
            "LocalGradientAggregationHelper", "check_extension", "check_num_rank_power_of_2", "gpu_available",
            "handle_average_backwards_compatibility", "refs_to_vars", "split_list", "vars_to_refs",
        ),
        _HELPER,
    ),
    **dict.fromkeys(
        (
            "compression", "functions", "gradient_aggregation", "gradient_aggregation_eager", "mpi_ops",
            "sync_batch_norm", "util",
        ),
        _MODULE,
    ),
}  # fmt: skip
#: Names in horovod.keras and horovod.tensorflow.keras.
KERAS: Mapping[str, str] = {"elastic": ELASTIC, "is_version_greater_equal_than": _HELPER}
#: Names in their modules ``callbacks``.
CALLBACKS: Mapping[str, str] = {
    "BestModelCheckpoint": "it is for Horovod's Spark estimators, which set its path; put keras.callbacks."
    "ModelCheckpoint(path, save_best_only=True) behind MetricAverageCallback on one rank",
    "is_version_greater_equal_than": _HELPER,
    **dict.fromkeys(("CommitStateCallback", "UpdateBatchStateCallback", "UpdateEpochStateCallback"), ELASTIC),
}


class Local:
    """The trainable variables of some layers, and others that were added.

    ``scales`` divides their gradients by the number of ranks, so that a loss summed over ranks is minimised
    with the same step as the mean of gradients elsewhere; it is Horovod's ``scale_local_gradients``.
    """

    def __init__(self, layers: Any = None, scales: bool = True) -> None:
        self._layers = _layers(layers)
        self._variables: list[Any] = []
        self.scales = scales

    def add(self, variable: Any) -> None:
        self._variables.append(variable)

    def __contains__(self, variable: Any) -> bool:
        key = _key(variable)
        return any(_key(each) == key for each in self._all())

    def _all(self) -> Iterable[Any]:
        yield from self._variables
        for layer in self._layers:
            yield from layer.trainable_variables

    def gradient(self, own: Any, size: int) -> Any:
        """Return this rank's gradient, divided by the number of ranks if ``scales``."""
        if own is None or not self.scales or size == 1:
            return own
        if isinstance(own, tf.IndexedSlices):
            return tf.IndexedSlices(own.values / size, own.indices, own.dense_shape)
        return own / size


def _key(variable: Any) -> int:
    """Return the same key for a Keras variable and the TensorFlow variable in it."""
    return id(variable._value if isinstance(variable, keras.Variable) else variable)


def _layers(given: Any) -> list[Any]:
    layers = [given] if isinstance(given, keras.layers.Layer) else list(given or [])
    if wrong := [layer for layer in layers if not isinstance(layer, keras.layers.Layer)]:
        raise ConfigError(f"local_layers must be layers of Keras, got {type(wrong[0]).__name__}")
    return layers


def check_ignored(num_groups: Any, groups: Any, **words: Any) -> None:
    """Raise ConfigError for values that Horovod would not accept either.

    ``groups`` tells what travels together there; here exchange buckets form by themselves, and no value
    depends on them. ``words`` are names of operations, which have none here, and devices. A compression in
    their place was meant as ``compression=``.
    """
    for key, word in words.items():
        if word is not None and (not isinstance(word, str) or _is_compression(word)):
            kind = "a compression" if isinstance(word, str | Policy | Compressor) else type(word).__name__
            raise ConfigError(
                f"{key} must be a string, got {kind}; pass a compression by its keyword, compression=..."
            )
    for key, number in (("num_groups", num_groups), ("groups", groups)):
        if number is None or (type(number) is int and number >= (key == "groups")):
            continue
        if key == "num_groups" or not isinstance(number, list):
            raise ConfigError(
                f"{key} must be a positive number or a list of lists of variables, got {number!r}"
            )


def _is_compression(name: str) -> bool:
    try:
        from_string(name)
    except ConfigError:
        return False
    return True


def refusing(module: str, reasons: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a module's ``__getattr__``, which finds what contrib adds and tells why a name is missing."""

    def refuse(name: str) -> Any:
        if name in CONTRIB and name in sys.modules[module].__all__:
            return contributed(name)
        reason = reasons.get(name)
        if reason is None:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        raise MissingNameError(f"{module} has no {name!r}: {reason}")

    return refuse
