"""Variables whose gradients stay local, and checks of Horovod's arguments that have no effect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from gradcomp.compress import Compressor, Policy
from gradcomp.compress.registry import from_string
from gradcomp.core.errors import ConfigError


class Local:
    """The trainable variables of some layers, and others that were added.

    ``scales`` divides their gradients by the number of ranks, so that a loss summed over ranks is minimised
    with the same step as the mean of gradients elsewhere; it is Horovod's ``scale_local_gradients``.
    """

    def __init__(self, layers: Any = None, scales: bool = True) -> None:
        self._layers = [layers] if isinstance(layers, keras.layers.Layer) else list(layers or [])
        if wrong := [layer for layer in self._layers if not isinstance(layer, keras.layers.Layer)]:
            raise ConfigError(f"local_layers must be layers of Keras, got {type(wrong[0]).__name__}")
        self._variables: list[Any] = []
        self.scales = scales

    def add(self, variable: Any) -> None:
        self._variables.append(variable)

    def __contains__(self, variable: Any) -> bool:
        own = [*self._variables, *(each for layer in self._layers for each in layer.trainable_variables)]
        return key_of(variable) in map(key_of, own)

    def gradient(self, own: Any, size: int) -> Any:
        """Return this rank's gradient, divided by the number of ranks if ``scales``."""
        return change_values(own, lambda values: values / size) if self.scales and size > 1 else own


def change_values(gradient: Any, change: Callable[[Any], Any]) -> Any:
    """Return the gradient with other values: a tensor, tf.IndexedSlices, or None for none."""
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(change(gradient.values), gradient.indices, gradient.dense_shape)
    return None if gradient is None else change(gradient)


def key_of(variable: Any) -> int:
    """Return the same key for a Keras variable and the TensorFlow variable in it."""
    return id(variable._value if isinstance(variable, keras.Variable) else variable)


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
