"""The kernel that tells gradients of zeros from others stops at the first element that is none."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import numpy as np
import pytest
from cuda_on_cpu.driver import CpuDriver
from kernels.standin import FOLDER

from gradcomp.kernels.cuda.backend import CudaKernels
from gradcomp.kernels.segments import SEGMENT

PAGE = mmap.PAGESIZE
PAGES = 1024


def read_pages(memory: mmap.mmap) -> int:
    """How many pages of fresh shared memory somebody has touched: others do not exist yet."""
    here = (ctypes.c_uint8 * PAGES)()
    view = (ctypes.c_uint8 * len(memory)).from_buffer(memory)
    found = ctypes.CDLL(None, use_errno=True).mincore(ctypes.byref(view), ctypes.c_size_t(len(memory)), here)
    assert found == 0
    return sum(page & 1 for page in here)


@pytest.fixture
def memory() -> Any:
    return mmap.mmap(-1, PAGES * PAGE)


def has_nonzero(memory: mmap.mmap, order: int = 0) -> bool:
    view = (ctypes.c_uint8 * len(memory)).from_buffer(memory)
    table, found = np.zeros(1, SEGMENT), np.zeros(1, np.uint8)
    table["gradient"], table["length"] = ctypes.addressof(view), len(memory) // 4
    CudaKernels(CpuDriver(FOLDER, order)).nonzero(table, found)
    return bool(found[0])


def test_a_row_is_left_at_its_first_element_that_is_not_zero(memory: mmap.mmap) -> None:
    memory[0:4] = np.float32(1.0).tobytes()
    assert has_nonzero(memory)
    assert read_pages(memory) < PAGES // 20


def test_a_row_of_zeros_is_read_to_its_end(memory: mmap.mmap) -> None:
    assert not has_nonzero(memory)
    assert read_pages(memory) == PAGES


@pytest.mark.parametrize("order", [0, 1, 2])
@pytest.mark.parametrize("at", [0, 12345, 32 * 2048 - 1, 32 * 2048, PAGES * PAGE // 4 - 1])
def test_one_element_is_found_wherever_it_is(at: int, order: int, memory: mmap.mmap) -> None:
    memory[4 * at : 4 * at + 4] = np.float32(-1e-45).tobytes()
    assert has_nonzero(memory, order)
