"""Layers: sizes, names, dtypes."""

from __future__ import annotations

import pytest

from gradcomp import ConfigError, LayerSpec
from gradcomp.core.layers import ITEM_BYTES, check_unique
from gradcomp.kernels.segments import DTYPES


@pytest.mark.parametrize(("shape", "size"), [((), 1), ((0, 5), 0), ((3,), 3), ((2, 3, 4, 5), 120)])
def test_size_is_the_product_of_the_shape_and_bytes_follow_the_dtype(shape: tuple[int, ...], size: int):
    assert LayerSpec("w", shape).size == size
    for dtype in DTYPES:
        assert LayerSpec("w", shape, dtype.name).nbytes == size * dtype.itemsize
    assert len(DTYPES) == len(ITEM_BYTES)


@pytest.mark.parametrize("dtype", ["int32", "float8", "complex64", ""])
def test_a_dtype_that_cannot_travel_is_refused_with_the_layers_name(dtype: str):
    with pytest.raises(ConfigError, match=r"block\.weight"):
        LayerSpec("block.weight", (3,), dtype)


def test_names_used_twice_are_all_listed():
    with pytest.raises(ConfigError, match=r"more than once: a, c$"):
        check_unique([LayerSpec(name, (1,)) for name in "cabcac"])


def test_the_hash_depends_on_the_name_alone():
    assert LayerSpec("a", (1,)).hash == LayerSpec("a", (2, 3), "float64").hash
    assert LayerSpec("a", (1,)).hash != LayerSpec("b", (1,)).hash
