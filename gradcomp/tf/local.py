"""Variables whose gradients stay each rank's own and are not exchanged."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

from gradcomp.core.errors import ConfigError


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
