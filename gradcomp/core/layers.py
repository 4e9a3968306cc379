"""The description of a layer without its values."""

from __future__ import annotations

import bisect
import itertools
import math
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Literal

from gradcomp.core.errors import ConfigError

Kind = Literal["weight", "bias", "norm", "embedding"]

#: Gradient dtypes that can be exchanged, with their size in bytes.
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8}


@dataclass(frozen=True)
class LayerSpec:
    """One named gradient tensor.

    ``name`` is unique within an exchanger, ``shape`` in elements, ``dtype`` one of :data:`ITEM_BYTES`.
    ``kind`` is the layer's role in the model, as far as the frontend can tell.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    kind: Kind = "weight"

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise ConfigError(
                f"layer {self.name!r} has dtype {self.dtype}; gradcomp exchanges {', '.join(ITEM_BYTES)}"
            )

    @cached_property
    def size(self) -> int:
        """Returns the number of elements, the product of the shape."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Returns the size of the gradient in bytes."""
        return self.size * ITEM_BYTES[self.dtype]

    @cached_property
    def hash(self) -> int:
        """Returns the 32-bit hash of the name, a coordinate of the random counter (a collision is harmless)."""
        return zlib.crc32(self.name.encode())


def check_unique(layers: Sequence[LayerSpec]) -> None:
    """Raises ConfigError that lists every name used more than once."""
    counts = Counter(layer.name for layer in layers)
    twice = sorted(name for name, count in counts.items() if count > 1)
    if twice:
        raise ConfigError(f"layer names must be unique; used more than once: {', '.join(twice)}")


def balanced_parts(sizes: Sequence[int], parts: int) -> list[tuple[int, int]]:
    """Returns where each part of consecutive layers begins and ends.

    The parts have about as many elements, and none is empty.
    """
    ends = list(itertools.accumulate(sizes, initial=0))
    borders = [0]
    for part in range(1, parts):
        wanted = bisect.bisect_left(ends, ends[-1] * part / parts)
        borders.append(min(max(wanted, borders[-1] + 1), len(sizes) - parts + part))
    return list(itertools.pairwise([*borders, len(sizes)]))


@dataclass(frozen=True)
class Filter:
    """Selects the layers that are worth compressing; the others are sent exactly.

    Small, one-dimensional, bias and normalisation layers are sensitive and take few bytes (Markov 2024, section 3.5.1,
    CGX). ``include`` and ``exclude`` are shell patterns on the layer name and take precedence over everything else,
    ``exclude`` first.
    """

    exclude_kinds: tuple[Kind, ...] = ("bias", "norm")
    min_elements: int = 1024
    min_dimensions: int = 2
    exclude: tuple[str, ...] = ()
    include: tuple[str, ...] = ()

    def reason_to_exclude(self, layer: LayerSpec) -> str | None:
        """Returns why the layer is sent exactly, or None if it is compressed."""
        if any(fnmatchcase(layer.name, pattern) for pattern in self.exclude):
            return "excluded by name"
        if layer.dtype == "float64":
            return "float64"
        if any(fnmatchcase(layer.name, pattern) for pattern in self.include):
            return None
        if layer.kind in self.exclude_kinds:
            return layer.kind
        if len(layer.shape) < self.min_dimensions:
            return f"fewer than {self.min_dimensions} dimensions"
        if layer.size < self.min_elements:
            return f"fewer than {self.min_elements} elements"
        return None
