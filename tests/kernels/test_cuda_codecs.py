"""What only a GPU's codecs have: a block for a large bucket, vectors where memory allows them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kernels.groups import CODECS, Group, Segment, nearest_level
from kernels.standin import cuda_body

from gradcomp.kernels import reference, segments


class Aligned(Group):
    """Next residuals and outputs begin on boundaries of sixteen bytes."""

    def _with_arrays(self, column: str, dtypes: Any) -> Any:
        table, arrays = super()._with_arrays(column, dtypes)
        for i, array in enumerate(arrays):
            if array is not None:
                room = np.full(len(array) + 16, np.nan, array.dtype)
                begin = 1 + -(room.ctypes.data + array.itemsize) % 16 // array.itemsize
                arrays[i] = room[begin:][: len(array)]
                assert arrays[i].ctypes.data % 16 == 0
                table[i][column] = arrays[i].ctypes.data
        return table, arrays


LARGE = 9001
"""Elements of a bucket that a block works on; the next one begins in the middle of a byte, and of a vector."""


def both(group: Group, kernel: str, *arguments: Any, **settings: Any) -> None:
    """The bytes of the reference, in two orders of threads."""
    expected = getattr(group, kernel)(reference, *arguments, **settings)
    for order in (1, 2):
        assert getattr(group, kernel)(cuda_body(order), *arguments, **settings) == expected


@pytest.mark.parametrize("codec", ["minmax", "l2", "linf", "sign", "vote", "onebit", "codebook-l2"])
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


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("dtype", [segments.FLOAT32, segments.FLOAT16])
def test_vectors_and_what_is_left_of_them(bits: int, dtype: int) -> None:
    rng = np.random.default_rng(0)
    rows = []
    for length in (127, 128, 136, 511, 512, 516, 1025):
        for gradient_at, residual_at in ((0, 0), (1, 0), (0, 1)):
            gradient = rng.normal(size=length + 1).astype(segments.DTYPES[dtype])[gradient_at:][:length]
            residual = rng.normal(size=length + 1).astype(np.float32)[residual_at:][:length]
            rows.append(
                Segment(
                    gradient,
                    residual,
                    next_residual=True,
                    bits=bits,
                    bucket_size=1024,
                    dtype=dtype,
                    start=3 * len(rows),
                )
            )
    for kind in (Group, Aligned):
        group = kind(segments.MINMAX, rows)
        both(group, "encode", stochastic=True, scale=0.5)
        payload = group.encode(reference, stochastic=False).payload
        both(group, "decode", payload, divisor=3.0, scale=0.5)
        both(group, "decode_add", payload, scale=0.5)
