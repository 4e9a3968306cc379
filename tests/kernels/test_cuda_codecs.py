"""What only a GPU's codecs have: several blocks for a large bucket, tiles of a block, vectors where memory allows."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import numpy as np
import pytest
from cuda_on_cpu.driver import CpuDriver
from kernels.groups import CODECS, AlignedArray, Group, Segment, nearest_level
from kernels.standin import FOLDER, cuda_backend

from gradcomp.kernels import reference, segments
from gradcomp.kernels.cuda.backend import CudaKernels

LARGE = 9001
"""Elements of a bucket that a team does not read; the next one begins in the middle of a byte, and of a vector."""

PART = 16 * 4096
"""Elements that a block adds up of such a bucket."""


def both(group: Group, kernel: str, *arguments: Any, **settings: Any) -> None:
    """The bytes of the reference, in two orders of threads."""
    expected = getattr(group, kernel)(reference, *arguments, **settings)
    for order in (1, 2):
        assert getattr(group, kernel)(cuda_backend(order), *arguments, **settings) == expected


@pytest.mark.parametrize(
    "codec",
    ["minmax", "l2", "linf", "sign", "vote", "onebit", "codebook-l2", "codebook-minmax", "e2m1", "nvfp4"],
)
def test_buckets_of_a_block(codec: str) -> None:
    rng = np.random.default_rng(0)
    bits = nearest_level(CODECS[codec], 3)
    rows = [
        Segment(
            rng.normal(size=length).astype(np.float32),
            rng.normal(size=length).astype(np.float32) if residual else None,
            next_residual=residual,
            bits=bits,
            bucket_size=size,
            start=8 * size,
        )
        for length, size, residual in (
            (2 * LARGE + 5, LARGE, True),
            (LARGE, LARGE, False),
            (9000, 1 << 20, True),
        )
    ]
    group = Group(CODECS[codec], rows)
    both(group, "encode", stochastic=True)
    payloads = [group.encode(reference, stochastic=False, scale=scale).payload for scale in (1.0, 0.3)]
    both(group, "reduce", payloads, stochastic=False)


@pytest.mark.parametrize("codec", ["l2", "onebit", pytest.param("minmax", marks=pytest.mark.full)])
def test_many_blocks_find_the_scale_of_a_layer(codec: str) -> None:
    """A bucket of two parts and a rest, in the order of the reference; one of fewer elements beside it."""
    rng = np.random.default_rng(0)
    bits = nearest_level(CODECS[codec], 3)
    lengths = (2 * PART + 4099, 100)
    rows = [Segment(rng.normal(size=n).astype(np.float32), bits=bits, bucket_size=1 << 30) for n in lengths]
    group, driver = Group(CODECS[codec], rows), CpuDriver(FOLDER, 2)
    expected = group.encode(reference)
    assert group.encode(CudaKernels(driver)) == expected
    assert [(name, blocks) for name, blocks in driver.launched if "parts" in name] == [
        ("encode_parts", 3 + 1),
        ("join_parts", 2),
    ]


@pytest.mark.full
@pytest.mark.parametrize("codec", ["sign", "codebook-l2", "onebit"])
def test_more_parts_than_a_team_joins_at_once(codec: str) -> None:
    rng = np.random.default_rng(0)
    bits = nearest_level(CODECS[codec], 3)
    rows = [Segment(rng.normal(size=18 * PART + 5).astype(np.float32), bits=bits, bucket_size=1 << 30)]
    group = Group(CODECS[codec], rows)
    assert group.encode(cuda_backend(2)) == group.encode(reference)


@pytest.mark.parametrize("residents", [1, 4, 1000])
def test_blocks_share_the_tiles(residents: int) -> None:
    """As many blocks as run at a time go through all tiles, whatever rows these belong to; never more than tiles."""
    rng = np.random.default_rng(0)
    rows = [
        Segment(rng.normal(size=n).astype(np.float32), next_residual=True, bucket_size=64)
        for n in (64 * 16 * 3 + 5, 0, 7, 64 * 16 * 2)
    ]
    group, driver = Group(segments.MINMAX, rows), CpuDriver(FOLDER, 1)
    driver.residents = residents
    backend = CudaKernels(driver)
    expected = group.encode(reference)
    assert group.encode(backend) == expected
    payloads = [expected.payload] * 2
    assert group.reduce(backend, payloads) == group.reduce(reference, payloads)
    assert group.decode(backend, expected.payload) == group.decode(reference, expected.payload)
    launched = dict(driver.launched)
    assert launched["encode_nearest"] == launched["reduce_nearest"] == min(residents, 4 + 1 + 2)
    assert launched["decode"] == min(residents, 3)


@pytest.mark.parametrize(
    ("codec", "bits", "dtype"),
    [
        *(
            ("minmax", bits, dtype)
            for bits in (1, 2, 3, 4, 8)
            for dtype in (segments.FLOAT32, segments.FLOAT16)
        ),
        ("minmax", 4, segments.BFLOAT16),
        *(("l2", 4, dtype) for dtype in (segments.FLOAT16, segments.BFLOAT16)),
        *(("fp16", 0, dtype) for dtype in (segments.FLOAT16, segments.BFLOAT16)),
    ],
)
def test_vectors_and_what_is_left_of_them(codec: str, bits: int, dtype: int) -> None:
    rng = np.random.default_rng(0)
    rows = []
    for length in (127, 128, 136, 511, 512, 516, 1537):
        for gradient_at, residual_at in ((0, 0), (1, 0), (0, 1), (4, 4)):
            rows.append(
                Segment(
                    rng.normal(size=length + 4).astype(segments.DTYPES[dtype])[gradient_at:][:length],
                    rng.normal(size=length + 4).astype(np.float32)[residual_at:][:length],
                    next_residual=True,
                    bits=bits,
                    bucket_size=1024 if length % 2 else 512,
                    dtype=dtype,
                    start=3 * len(rows),
                    layer=len(rows),
                )
            )
    for memory in (None, AlignedArray):
        group = Group(CODECS[codec], rows, memory=memory)
        both(group, "encode", stochastic=True, scale=0.5)
        encoded = group.encode(reference, stochastic=False)
        both(group, "decode", encoded.payload, divisor=3.0, scale=0.5)
        both(group, "decode_add", encoded.payload, scale=0.5)
        assert group.encode(cuda_backend(2), stochastic=False) == encoded


# --- gradients of zeros -----------------------------------------------------------------------------------

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
    table, found = np.zeros(1, segments.SEGMENT), np.zeros(1, np.uint8)
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
