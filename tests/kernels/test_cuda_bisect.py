"""RedSync's search on a GPU: the thresholds of the host, from one call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from kernels import standin

from gradcomp import RedSync
from gradcomp.kernels import segments
from gradcomp.testing.simulation import shared


@pytest.fixture
def device() -> Iterator[Any]:
    with standin.device(order=2) as (place, kernels):
        yield place, kernels


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
def test_thresholds_are_those_of_the_host(density: float, tolerance: float, device: Any) -> None:
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
    expected = compressor.thresholds(here, wanted, 0)
    before = place.driver.synchronized
    assert compressor.thresholds(there, wanted, 0).tobytes() == expected.tobytes()
    assert place.driver.synchronized == before + 1
    assert kernels.called == {"bisect"}
