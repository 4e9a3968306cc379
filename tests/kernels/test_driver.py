"""What every driver promises: CUDA's by CuPy or by the bindings, and the stand-in, alone and beneath the bindings."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from cuda_on_cpu.driver import CpuDriver
from kernels import fake_bindings, gpu
from kernels.standin import FOLDER

from gradcomp.core.state import Range, Residuals
from gradcomp.core.vectors import host_zeros
from gradcomp.kernels import devices
from gradcomp.kernels.cuda import vectors
from gradcomp.kernels.cuda.call import Call
from gradcomp.kernels.cuda.vectors import DeviceVector
from gradcomp.kernels.segments import SEGMENT

DRIVERS = [
    "stand-in",
    "pretended",
    *(pytest.param(name, marks=pytest.mark.gpu) for name in ("gpu", "gpu-bindings")),
]


@pytest.fixture(params=DRIVERS if gpu.problem() is None else DRIVERS[:2])
def driver(request: Any) -> Iterator[Any]:
    if request.param == "pretended":
        with fake_bindings.installed() as (_, made):
            yield made(1)
    elif request.param == "gpu-bindings":
        pytest.importorskip("cuda.bindings")
        from gradcomp.kernels.cuda import over_bindings

        devices.cuda(0)  # the GPU is taken
        yield over_bindings.driver(0)
    else:
        yield CpuDriver(FOLDER) if request.param == "stand-in" else devices.cuda(0).driver


def uploaded(driver: Any, values: Any) -> Any:
    """A block with these bytes."""
    block = driver.allocate(values.nbytes)
    staged = driver.pinned(values.nbytes)
    staged[:] = values.view(np.uint8)
    driver.upload(block.address, staged)
    driver.synchronize()
    return block


def downloaded(driver: Any, address: int, nbytes: int) -> Any:
    staged = driver.pinned(nbytes)
    driver.download(staged, address)
    driver.synchronize()
    return staged


@pytest.mark.parametrize("nbytes", [1, 3, 256, 1_000_003])
def test_copies_arrive(driver: Any, nbytes: int) -> None:
    values = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
    block = uploaded(driver, values)
    assert block.address % 256 == 0
    assert downloaded(driver, block.address, nbytes).tobytes() == values.tobytes()


def test_zero_leaves_what_is_beside_it(driver: Any) -> None:
    block = uploaded(driver, np.full(64, 7, np.uint8))
    driver.zero(block.address + 3, 20)
    assert downloaded(driver, block.address, 64).tolist() == [7] * 3 + [0] * 20 + [7] * 41


def test_a_vector_begins_as_zeros_and_is_read_and_written_by_copies(driver: Any) -> None:
    vector = DeviceVector.zeros(driver, 1000)
    assert vector.address % 256 == 0
    assert not vector.read().any()
    vector.write(np.arange(5, dtype=np.float32), 3)
    assert vector.read(2, 9).tolist() == [0, 0, 1, 2, 3, 4, 0]
    assert downloaded(driver, vector.address, 4000).view(np.float32).sum() == 10
    with pytest.raises(ValueError, match="read-only"):
        vector.read()[0] = 1  # it would be lost


def test_a_vector_is_copied_piece_by_piece(driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vectors, "_PIECE_BYTES", 256)
    values = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    vector = DeviceVector.zeros(driver, 1000)
    vector.write(values)
    assert vector.read().tobytes() == values.tobytes()


def test_places_of_a_vector(driver: Any) -> None:
    vector = DeviceVector.zeros(driver, 100)
    vector.write(np.arange(100, dtype=np.float32))
    places = np.array([70, 3, 4, 50])
    assert vector.take(places).tolist() == [70, 3, 4, 50]
    vector.put(places, np.zeros(4, np.float32))
    assert vector.read().sum() == 99 * 50 - 127
    assert vector.take(np.zeros(0, np.int64)).tolist() == []


def test_a_part_of_a_vector_is_the_same_memory(driver: Any) -> None:
    vector = DeviceVector.zeros(driver, 10)
    part = vector.part(4, 8)
    assert (part.address, part.size) == (vector.address + 16, 4)
    part.write(np.ones(4, np.float32))
    del vector
    assert part.part(1, 3).read().tolist() == [1, 1]


def test_state_on_a_device_is_that_of_the_host(driver: Any) -> None:
    found = []
    for zeros in (host_zeros, partial(DeviceVector.zeros, driver)):
        residuals = Residuals([10, 6], zeros)
        residuals.own([Range(0, 2, 6)], 3)
        residuals.second.set(0, np.arange(6, dtype=np.float32))
        # What is no longer owned goes to the first residual.
        residuals.own([Range(0, 0, 4), Range(1, 6, 0)], 3)
        residuals.first.store(np.array([1]), np.ones(6, np.float32))
        residuals.first.commit(np.array([False, True]))
        residuals.grow([10, 20])
        rows = [residuals.first.value(0), residuals.second.value(0), residuals.first.load(np.array([1]))]
        found.append([row.tolist() for row in rows])
    assert found[0] == found[1]
    assert found[0][0] == [0, 0, 0, 0, 6, 9, 12, 15, 0, 0]


def test_reaches_its_own_memory_and_no_other(driver: Any) -> None:
    block = driver.allocate(100)
    own = np.zeros(100, np.uint8)
    assert driver.reaches(block.address)
    assert driver.reaches(block.address + 99)
    assert not driver.reaches(own.ctypes.data)
    assert not driver.reaches(driver.pinned(100).ctypes.data)


def test_a_kernel_reads_a_vector(driver: Any) -> None:
    gradient = DeviceVector.zeros(driver, 3000)
    gradient.write(np.array([-0.5], np.float32), 2999)
    table = np.zeros(2, SEGMENT)
    table["gradient"], table["length"] = gradient.address, (2999, 3000)
    call = Call(driver)
    found = np.full(2, 9, np.uint8)
    begins = np.array([0, 2, 4])
    parameters = (call.give(table), call.give(begins), 2, call.result(found, zero=True))
    call.launch("rows.cu", "nonzero", 4, *parameters)
    call.run()
    assert found.tolist() == [0, 1]


def test_an_unknown_kernel_is_an_error(driver: Any) -> None:
    with pytest.raises((AttributeError, RuntimeError)):
        driver.function("rows.cu", "no_such_kernel", {})


def test_an_event_can_be_followed(driver: Any) -> None:
    event = driver.mark(0)
    driver.follow(event)
    block = uploaded(driver, np.arange(9, dtype=np.uint8))
    assert downloaded(driver, block.address, 9).tolist() == list(range(9))
    assert driver.reached(event)  # what was behind it is done


def test_a_device_reads_bytes_behind_an_event(driver: Any) -> None:
    values = np.random.default_rng(0).integers(0, 256, 1000, np.uint8)
    block = uploaded(driver, values)
    device = devices.Device("test", driver=driver)
    event = device.mark(driver.stream)
    assert device.read(block.address, 1000, event).tobytes() == values.tobytes()
    assert device.read(block.address, 0).tobytes() == b""
    assert devices.HOST.read(values.ctypes.data, 10).tolist() == values[:10].tolist()


def test_copies_of_a_device_without_kernels_are_read_when_they_have_come() -> None:
    values, looks = np.zeros(3, np.uint8), []

    class Late(devices.Device):
        def reached(self, events: Any) -> bool:
            looks.append(list(events))
            values[:] = len(looks)
            return len(looks) == 3

    assert Late("test").read(values.ctypes.data, 3, "event").tolist() == [3, 3, 3]
    assert looks == [["event"]] * 3
