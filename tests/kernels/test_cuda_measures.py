"""What controllers, and RedSync's search, measure on a GPU is what they measure on the host."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from kernels import standin

from gradcomp import NUQSGD, BlockFloat, Cast, LayerSpec, Quantize, RedSync, ScaledSign, TernGrad, TopK
from gradcomp.control.base import Environment
from gradcomp.control.distortion.errors import errors
from gradcomp.control.measurement import Share, Windowed
from gradcomp.core.scheme import Scheme
from gradcomp.core.topology import Topology
from gradcomp.kernels import segments
from gradcomp.kernels.devices import HOST
from gradcomp.testing.simulation import shared

FAMILIES: dict[str, list[Any]] = {
    "min-max": [Quantize(bits, bucket_size=128) for bits in (8, 1, 4, 3)],
    "nearest": [Quantize(bits, rounding="nearest") for bits in range(1, 9)],
    "shift": [Quantize(bits, bucket_size=100, rounding="shift") for bits in (1, 4, 8)],
    "l2": [Quantize(bits, bucket_size=100, scaling="l2") for bits in range(1, 9)],
    "linf": [Quantize(bits, bucket_size=1000, scaling="linf") for bits in (1, 2, 5)],
    "codebook": [NUQSGD(bits, bucket_size=37) for bits in (2, 3, 8)],
    "block floats": [
        *(BlockFloat(form) for form in ("fp8_e4m3", "fp8_e5m2", "fp4_e2m1")),
        BlockFloat("fp4_e2m1", 16, scale="e4m3"),
    ],
    "casts": [Cast("float16"), Cast("bfloat16")],
    "a scale for all": [ScaledSign(bucket_size=None), TernGrad(bucket_size=None)],
    "coded selection": [TopK(0.1, values=Quantize(4))],
    "several families": [Quantize(4), TopK(0.1), Quantize(2), Cast("bfloat16")],
}


@pytest.fixture
def device() -> Iterator[Any]:
    with standin.device(order=2) as (place, kernels):
        yield place, kernels


@pytest.mark.parametrize("choices", FAMILIES.values(), ids=FAMILIES)
@pytest.mark.parametrize("size", [1, 8, 999, 20_000])
def test_errors_are_those_of_the_host(choices: list[Any], size: int, device: Any) -> None:
    place, kernels = device
    layer = LayerSpec("weight", (size,), "float32", "weight")
    values = np.random.default_rng(size).normal(size=size).astype(np.float32)
    there = place.zeros(size)
    there.write(values)
    expected = errors(choices, layer, values, seed=5)
    assert errors(choices, layer, there, seed=5, device=place) == pytest.approx(expected, rel=1e-9, abs=1e-12)
    if size > 1:
        on_host = (FAMILIES["a scale for all"], FAMILIES["coded selection"])
        assert ("losses" in kernels.called) == (choices not in on_host)


def test_sums_of_a_checkpoint_are_measured_on_the_device(device: Any) -> None:
    place, _ = device
    layer, values = LayerSpec("weight", (600,)), np.arange(600, dtype=np.float32)
    environment = Environment([layer], [Quantize(4)], 0, Topology.one_host(1), Scheme("sra"), device=place)
    seen: list[Any] = []

    def measure(sums: Any, left: Any) -> Any:
        seen.extend(sums.values())
        return np.zeros((1, 1))

    gathered = Windowed(Share(environment, {"weight": 0}, [600], measure, None), every=4, window=2)
    assert gathered.resume({"sums": {"weight": values}, "taken": {"weight": values}})
    gathered.measuring()()
    assert [place.driver.reaches(vector.address) for vector in seen] == [True]
    assert np.array_equal(seen[0].read(), values)


def test_a_layer_is_read_once_for_all_levels(device: Any) -> None:
    place, _ = device
    there = place.zeros(5000)
    layer = LayerSpec("weight", (5000,), "float32", "weight")
    before = len(place.driver.launched)
    errors([Quantize(bits) for bits in range(1, 9)], layer, there, seed=0, device=place)
    names = [name for name, _ in place.driver.launched[before:]]
    assert names.count("losses_stochastic") == 1


def test_what_no_code_can_carry_is_infinite(device: Any) -> None:
    place, _ = device
    there = place.zeros(600)
    there.write(np.array([3e38, -3e38], np.float32), 5)  # the span overflows
    layer = LayerSpec("weight", (600,), "float32", "weight")
    found = errors(
        [Quantize(4, bucket_size=512), Quantize(4, bucket_size=512, scaling="linf")],
        layer,
        there,
        seed=0,
        device=place,
    )
    assert np.isinf(found[0])
    assert np.isfinite(found[1])


@pytest.mark.parametrize("lengths", [[0], [1, 0, 7], [16_384, 16_385, 3], [50_000]])
def test_moments(lengths: list[int], device: Any) -> None:
    place, kernels = device
    rng = np.random.default_rng(0)
    arrays: list[Any] = []
    table = np.zeros(len(lengths), segments.SEGMENT)
    for row, length in enumerate(lengths):
        array = shared(place.driver, length)
        array[:] = rng.normal(size=length)
        arrays.append(array)
        table[row]["length"], table[row]["gradient"] = length, array.ctypes.data if length else 0
    found = kernels.moments(table)
    assert found[:, 0] == pytest.approx(
        [array.sum(dtype=np.float64) for array in arrays], rel=1e-12, abs=1e-9
    )
    assert found[:, 1] == pytest.approx(
        [(array.astype(np.float64) ** 2).sum() for array in arrays], rel=1e-12
    )


def test_buckets_beyond_a_team_are_refused(device: Any) -> None:
    _, kernels = device
    table = np.zeros(1, segments.SEGMENT)
    table["length"] = table["bucket_size"] = 8193
    with pytest.raises(ValueError, match="more than 8192"):
        kernels.losses(segments.MINMAX, table, np.array([4], np.int32), draw=None)


def rows(place: Any, kinds: list[Any]) -> tuple[Any, list[Any]]:
    table = np.zeros(len(kinds), segments.SEGMENT)
    arrays = []
    for row, values in enumerate(kinds):
        array = np.asarray(values, np.float32) if place is None else shared(place.driver, len(values))
        array[:] = values
        arrays.append(array)
        table[row]["length"], table[row]["next_residual"] = len(values), array.ctypes.data
    return table, arrays


@pytest.mark.parametrize("density", [0.001, 0.05, 0.9, 1.0])
@pytest.mark.parametrize("tolerance", [0.01, 0.25, 1.0])
def test_thresholds_of_redsync_are_those_of_the_host(density: float, tolerance: float, device: Any) -> None:
    rng = np.random.default_rng(3)
    kinds = [
        rng.normal(size=20_000),
        rng.integers(-3, 4, size=999),
        np.ones(17),
        np.zeros(40),
        [5.0],
        np.exp(8 * rng.normal(size=3000)),
    ]
    place, kernels = device
    compressor = RedSync(density, tolerance)
    here, _kept = rows(None, kinds)
    there, _also = rows(place, kinds)
    wanted = np.maximum(np.rint(density * here["length"]), 1).astype(np.int64)
    expected = compressor.thresholds(HOST, here, wanted, 0)
    before = place.driver.synchronized
    assert compressor.thresholds(place, there, wanted, 0).tobytes() == expected.tobytes()
    assert place.driver.synchronized == before + 1
    assert kernels.called == {"bisect"}
