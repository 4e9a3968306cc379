"""What holds for all compressors that send what reaches a threshold."""

from __future__ import annotations

import numpy as np
import pytest
from compress.selecting import is_top, samples, select

from gradcomp import DGC, AdaComp, Compressor, ConfigError, GlobalTopK, RedSync, SIDCo, TopK
from gradcomp.compress import from_string

KINDS = [DGC, RedSync, SIDCo]
COMPRESSORS = [
    DGC(0.01),
    DGC(0.5, sample=0.5),
    RedSync(0.01),
    RedSync(0.6, tolerance=0.05),
    SIDCo(0.01),
    SIDCo(0.3, stages=1),
    SIDCo(0.005, stages=5, distribution="pareto"),
]
every_compressor = pytest.mark.parametrize("compressor", COMPRESSORS, ids=Compressor.to_string)
SIZE = 20_000


@every_compressor
@pytest.mark.parametrize("name", samples(1))
def test_selection_is_of_the_largest_and_within_its_limit(compressor: Compressor, name: str):
    found = select(compressor, samples(SIZE)[name])
    assert is_top(found.p[0], found.indices[0])
    assert min(1, np.count_nonzero(found.p[0])) <= len(found.indices[0]) <= found.limits[0]
    assert found.values[0] == found.p[0][found.indices[0]].tolist()
    assert found.flags == [0]


@pytest.mark.parametrize(
    "compressor", [*COMPRESSORS, TopK(0.3), GlobalTopK(0.9), AdaComp(limit=1.0)], ids=Compressor.to_string
)
def test_no_zero_is_selected(compressor: Compressor):
    layers = samples(SIZE)
    layers["one of many"] = np.where(np.arange(SIZE) == 77, np.float32(-1e-45), np.float32(-0.0))
    found = select(compressor, *layers.values())
    assert all(map(all, found.values))
    zero, one = (found.indices[list(layers).index(name)] for name in ("zero", "one of many"))
    assert (zero, one) == ([], [77])


def test_top_k_selects_k_or_all_that_are_not_zero():
    layers = {"empty": np.zeros(0, np.float32), **samples(SIZE)}
    for density in (0.001, 0.3, 1.0):
        with_zeros, without = (
            select(TopK(density, zeros=zeros), *layers.values()) for zeros in (True, False)
        )
        assert [len(row) for row in with_zeros.indices] == with_zeros.limits
        for p, indices, expected in zip(with_zeros.p, without.indices, with_zeros.indices, strict=True):
            assert indices == [i for i in expected if p[i] != 0]


@every_compressor
def test_layers_of_a_group_are_selected_as_if_they_were_alone(compressor: Compressor):
    layers = [x[: SIZE // (i + 1)] for i, x in enumerate(samples(SIZE).values())]
    layers.insert(3, np.zeros(0, np.float32))
    layers.insert(5, np.array([1, np.nan, 2], np.float32))
    together = select(compressor, *layers, step=3)
    for i, layer in enumerate(layers):
        alone = select(compressor, layer, step=3)
        assert alone.indices == [together.indices[i]]
        assert alone.flags == [together.flags[i]]


@every_compressor
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_layer_that_is_not_finite_selects_nothing(compressor: Compressor, value: float):
    layer = np.ones(100, np.float32)
    layer[7] = value
    found = select(compressor, layer)
    assert found.flags == [1]
    assert found.indices == [[]]


@every_compressor
def test_an_empty_layer_selects_nothing(compressor: Compressor):
    found = select(compressor, np.zeros(0, np.float32))
    assert (found.indices, found.flags, found.limits) == ([[]], [0], [0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 3, 50_000])
def test_density_one_selects_all(kind: type, size: int):
    layer = np.random.default_rng(size).standard_normal(size).astype(np.float32)
    assert select(kind(1.0), layer).indices == [list(range(size))]


@every_compressor
def test_selection_is_made_from_gradient_and_residual(compressor: Compressor):
    rng = np.random.default_rng(0)
    gradient, residual = rng.standard_normal((2, 5000)).astype(np.float32)
    apart = select(compressor, gradient, residuals=[residual])
    assert apart.indices == select(compressor, gradient + residual).indices
    assert np.array_equal(apart.p[0], gradient + residual)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("density", [0, -0.1, 1.5, float("nan"), float("inf"), True, "0.1", None])
def test_impossible_density_is_refused(kind: type, density):
    with pytest.raises(ConfigError, match="density"):
        kind(density)


@pytest.mark.parametrize("kind", KINDS)
def test_density_is_the_level(kind: type):
    assert kind(0.5).with_level(0.25) == kind(0.25)
    assert kind(0.5).family_string() == kind(0.25).family_string()
    with pytest.raises(ConfigError, match="density"):
        kind(0.5).with_level(2)


@pytest.mark.parametrize("kind", KINDS)
def test_values_may_be_coded(kind: type):
    text = f"{kind.name}:density=0.1,values=[quantize:bits=4]"
    assert from_string(text).values == from_string("quantize:bits=4")


def test_small_layers_of_dgc_are_selected_as_top_k_selects_them():
    for size in (1, 2, 9, 1000):
        for name, layer in samples(size, seed=size).items():
            for density in (0.001, 0.05, 0.5):
                found, exact = select(DGC(density), layer, step=size), select(TopK(density), layer)
                assert found.indices == exact.indices, (size, name, density)
