"""Tables of the host's memory on a device that reaches none of it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from kernels import standin
from kernels.carried import Carried
from kernels.groups import Group, Segment

from gradcomp.kernels import reference, segments


@pytest.fixture
def carried() -> Iterator[Any]:
    with standin.device(order=2) as (place, strict):
        yield Carried(strict, place.driver)


def of(length: int, dtype: int = segments.FLOAT32) -> Any:
    return np.random.default_rng(length).normal(size=length).astype(segments.DTYPES[dtype])


@pytest.mark.parametrize("dtype", [segments.FLOAT32, segments.FLOAT16, segments.BFLOAT16])
def test_same_bytes_as_the_reference(carried: Any, dtype: int) -> None:
    # Two rows of one array, one beside it, one without anything.
    shared = of(300, dtype)
    rows = [
        Segment(shared[:200], of(200), next_residual=True, dtype=dtype, bucket_size=64),
        Segment(shared[100:], None, next_residual=True, dtype=dtype),
        Segment(of(7, dtype), of(7), dtype=dtype),
        Segment(None, length=5, next_residual=True, dtype=dtype),
        Segment(of(0, dtype), next_residual=True, dtype=dtype),
    ]
    group = Group(segments.MINMAX, rows)
    encoded = group.encode(reference)
    assert group.encode(carried) == encoded
    assert group.decode(carried, encoded.payload) == group.decode(reference, encoded.payload)
    assert group.reduce(carried, [encoded.payload] * 2) == group.reduce(reference, [encoded.payload] * 2)


@pytest.mark.parametrize(("at", "words"), [(-1, "before"), (4 * 6, "behind")])
def test_writing_beside_an_array_is_noticed(at: int, words: str) -> None:
    class Wrong:
        def spoil(self, table: Any) -> None:
            ctypes.memset(int(table["next_residual"][0]) + at, 0, 1)

    next_residual = of(6)
    table = np.zeros(1, segments.SEGMENT)
    table["next_residual"], table["length"] = next_residual.ctypes.data, 6
    with standin.device() as (place, _), pytest.raises(AssertionError, match=f"written {words} an array"):
        Carried(Wrong(), place.driver).spoil(table)


def test_what_is_not_written_is_not_touched(carried: Any) -> None:
    # Its pages may be read-only.
    gradient = np.frombuffer(bytes(of(64)), np.float32)
    group = Group(segments.FP32, [Segment(gradient)])
    assert group.encode(carried) == group.encode(reference)
