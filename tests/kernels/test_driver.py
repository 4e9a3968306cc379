"""What every driver promises: CuPy's on a GPU, and the stand-in."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cuda_on_cpu.driver import CpuDriver
from kernels import gpu
from kernels.standin import FOLDER

from gradcomp.kernels import devices
from gradcomp.kernels.cuda.call import Call
from gradcomp.kernels.segments import SEGMENT

DRIVERS = ["stand-in", pytest.param("gpu", marks=pytest.mark.gpu)]


@pytest.fixture(params=DRIVERS if gpu.problem() is None else DRIVERS[:1])
def driver(request: Any) -> Any:
    return CpuDriver(FOLDER) if request.param == "stand-in" else devices.cuda(0).driver


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


def test_managed_memory_is_zero_and_writable_here(driver: Any) -> None:
    room = driver.managed(1000)
    assert len(room) == 1000
    assert not room.any()
    assert room.ctypes.data % 256 == 0
    room[:] = 5
    assert downloaded(driver, room.ctypes.data, 1000).tolist() == [5] * 1000
    driver.zero(room.ctypes.data + 1, 998)
    driver.synchronize()
    assert room.sum() == 10


def test_views_keep_managed_memory(driver: Any) -> None:
    views = [driver.managed(4096).view(np.float32)[i:] for i in range(8)]
    for i, view in enumerate(views):
        view[:] = i
    assert [view.sum() for view in views] == [i * (1024 - i) for i in range(8)]
    assert len(driver.managed(0)) == 0


def test_reaches_its_own_memory_and_no_other(driver: Any) -> None:
    room, block = driver.managed(100), driver.allocate(100)
    own = np.zeros(100, np.uint8)
    assert driver.reaches(room.ctypes.data)
    assert driver.reaches(room.ctypes.data + 99)
    assert driver.reaches(block.address)
    assert not driver.reaches(own.ctypes.data)
    assert not driver.reaches(driver.pinned(100).ctypes.data)


def test_a_kernel_reads_and_writes_managed_memory(driver: Any) -> None:
    gradient = driver.managed(4 * 3000).view(np.float32)
    gradient[2999] = -0.5
    table = np.zeros(2, SEGMENT)
    table["gradient"], table["length"] = gradient.ctypes.data, (2999, 3000)
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
