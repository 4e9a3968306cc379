"""Layer specs of variables."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from typing import Any

from gradcomp.core.errors import ConfigError
from gradcomp.core.layers import Kind, LayerSpec
from gradcomp.tf.bridge import name_of

_NORM = re.compile(r"(^|[/_])(norm|ln|bn|layer_?norm|batch_?norm|group_?norm|rms_?norm)", re.IGNORECASE)


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
