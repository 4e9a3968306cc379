"""Subspace iteration on a GPU: columns of several chunks, what is kept for the next step, calls that are repeated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from cuda_on_cpu.driver import CpuDriver
from kernels.standin import FOLDER, cuda_backend, device

from gradcomp import LayerSpec, PowerSGD
from gradcomp.kernels import dispatch
from gradcomp.kernels.cuda.backend import CudaKernels
from gradcomp.kernels.cuda.call import Call
from gradcomp.kernels.devices import HOST
from gradcomp.kernels.reference_memory import CHUNK
from gradcomp.kernels.segments import Factor
from gradcomp.testing.simulation import Simulation

SIDES = [3 * CHUNK + 5, 7, CHUNK, CHUNK + 1, 2 * CHUNK]


def columns_of(sides: list[int], rank: int, seed: int = 0) -> tuple[Any, Any, Any, Any]:
    """n and r of each matrix, all columns, and where each matrix begins."""
    rows, ranks = np.array(sides, np.int64), np.full(len(sides), rank, np.int64)
    p = np.random.default_rng(seed).standard_normal(int((rows * ranks).sum())).astype(np.float32)
    return rows, ranks, p, np.cumsum(rows * ranks) - rows * ranks


def orthonormal(backend: Any, given: tuple[Any, Any, Any, Any]) -> bytes:
    rows, ranks, p, p_at = given
    p = p.copy()
    backend.orthogonalise(rows, ranks, Factor(p, p_at))
    return np.where(np.isnan(p), np.float32(np.nan), p).tobytes()


def special_columns() -> tuple[Any, Any, Any, Any]:
    """Zeros, a negative zero, columns that depend on others, tiny and huge ones, and one that is not finite."""
    rows, ranks, p, p_at = columns_of([2 * CHUNK + 9] * 3, 6)
    first, second, third = p.reshape(3, 6, -1)
    first[0], first[3] = -0.0, 0.0
    second[1] = 2 * second[0]
    second[2] *= np.float32(1e-38)
    second[4] *= np.float32(1e37)
    third[5, CHUNK + 3] = np.inf
    return rows, ranks, p, p_at


def test_blocks_share_the_chunks_of_a_long_column() -> None:
    driver = CpuDriver(FOLDER)
    given = columns_of(SIDES, 4)
    found = orthonormal(CudaKernels(driver), given)
    assert found == orthonormal(dispatch.named("reference"), given)
    assert dict(driver.launched)["orthogonalise"] == 4 + 1 + 1 + 2 + 2
    assert len(driver.launched) == 2
    assert driver.synchronized == 1


def test_a_matrix_has_so_many_blocks_at_most() -> None:
    driver = CpuDriver(FOLDER)
    given = columns_of([70 * CHUNK], 1)
    assert orthonormal(CudaKernels(driver), given) == orthonormal(dispatch.named("reference"), given)
    assert dict(driver.launched)["orthogonalise"] == 64


@pytest.mark.parametrize("order", [0, 1, 2])
def test_special_columns_of_several_chunks(order: int) -> None:
    given = special_columns()
    assert orthonormal(cuda_backend(order), given) == orthonormal(dispatch.named("reference"), given)


@pytest.mark.parametrize("given", [columns_of(SIDES, 5), special_columns()], ids=["plain", "special"])
def test_blocks_that_run_side_by_side_wait_for_each_other(given: Any) -> None:
    """In whatever order they come; the stand-in's others run one after another, so that the first does it all."""
    expected = orthonormal(dispatch.named("reference"), given)
    backend = CudaKernels(CpuDriver(FOLDER, parallel=True))
    for _ in range(3):
        assert orthonormal(backend, given) == expected


# --- what is kept ----------------------------------------------------------------------------------------------------


def kept_by(backend: Any, factor: Any, kept: Any) -> Any:
    sides, ranks = np.array([5, 2500], np.int64), np.array([3, 2], np.int64)
    at, before, after = (np.array(places, np.int64) for places in ([1, 16], [0, 20], [10100, 5100]))
    kept = kept.copy()
    backend.keep(sides, ranks, Factor(factor, at), kept, before, after)
    return kept


def test_columns_are_kept_as_the_reference_has_it() -> None:
    rng = np.random.default_rng(4)
    factor = rng.standard_normal(5020).astype(np.float32)
    factor[1:6], factor[6:11] = [0, -0.0, 0, 0, 0], [1e-45, 3e-41, 0, -1e-39, 2e-45]
    factor[11:16] = [3e38, -1e-40, 2.0, 0.25, -3.4e38]
    factor[16:2516][7] = np.inf
    kept = rng.standard_normal(10200).astype(np.float32)
    expected = kept_by(dispatch.named("reference"), factor, kept)
    assert kept_by(cuda_backend(2), factor, kept).tobytes() == expected.tobytes()
    changed = np.flatnonzero(expected != kept)
    assert changed.min() >= 5100
    np.testing.assert_array_equal(expected[10100:10105], kept[:5])  # the column of zeros
    largest = np.abs(expected[7600:10100]).max()
    assert 0.5 <= largest < 1
    np.testing.assert_array_equal(expected[5100:7600], factor[16:2516])  # not finite


# --- steps -----------------------------------------------------------------------------------------------------------


LAYERS = [
    LayerSpec("wide.weight", (12, 40), "float32", "weight"),
    LayerSpec("bias", (30,), "float32", "bias"),
    LayerSpec("tall.weight", (40, 9), "float32", "weight"),
]


@pytest.fixture
def ranks() -> Iterator[tuple[Simulation, Any]]:
    with device(order=2) as (place, _):
        yield Simulation(LAYERS, PowerSGD(2), 2, devices=[place, HOST], slice_elements=1 << 20), place.driver


def test_later_steps_write_nothing_down_anew(ranks: Any, monkeypatch: Any) -> None:
    """State has two places, which take turns, and layers are reordered once: four steps have it all."""
    simulation, _ = ranks
    made: Counter[str] = Counter()
    begin = Call.__init__

    def counted(call: Call, driver: Any) -> None:
        made["calls"] += 1
        begin(call, driver)

    monkeypatch.setattr(Call, "__init__", counted)
    for _ in range(4):
        simulation.step()
    assert made["calls"] > 0
    made.clear()
    for _ in range(4):
        simulation.step()
    assert made["calls"] == 0


def test_a_bucket_waits_for_three_events_and_blocks_for_nothing(ranks: Any) -> None:
    simulation, driver = ranks
    for _ in range(2):
        simulation.step()
    before = driver.waited, driver.synchronized
    simulation.step()
    assert driver.waited - before[0] == 3
    assert driver.synchronized == before[1]


def test_an_exact_layer_that_is_not_finite_reaches_every_rank(ranks: Any) -> None:
    simulation, _ = ranks
    gradients = simulation.gradients()
    gradients[0][1][7] = np.inf
    outcome = simulation.step(gradients)
    assert outcome.result.nonfinite.tolist() == [False, True, False]
    assert np.isnan(outcome.mean(1)).all()
    assert np.isfinite(outcome.mean(0)).all()
