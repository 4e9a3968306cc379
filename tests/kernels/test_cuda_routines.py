"""Kernel calls that are put together once: what is asked again, what is repeated, and what an error says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gradcomp.kernels import reference_indices, replayed_calls
from gradcomp.kernels.devices import HOST
from gradcomp.kernels.replayed_calls import Phase


class Lists:
    """Two lists of indices, which a routine codes; ``asked``: how often."""

    def __init__(self, device: Any) -> None:
        self.asked, self.kernels = 0, device.kernels
        self.counts = np.array([3, 2], np.int64)
        self.offsets, self.lengths = np.array([0, 3], np.int64), np.array([100, 50], np.int64)
        self.codings = np.full(2, reference_indices.RAW, np.int32)
        self.places = np.array([0, 12], np.int64)
        self.indices = np.array([1, 5, 9, 0, 7], np.uint32)
        self.payload = device.array(20, np.uint8)
        self.decoded = np.zeros(5, np.uint32)
        self.phase = Phase(device)

    def encode(self, key: int = 0) -> None:
        with self.phase.collecting() as started:
            replayed_calls.run(
                key,
                (self.indices, self.payload),
                lambda: self._code(self.kernels.encode_indices, self.indices),
            )
        started.start()
        started.finish()

    def decode(self) -> Any:
        self._code(self.kernels.decode_indices, self.decoded)
        return self.decoded.tolist()

    def _code(self, kernel: Any, lists: Any) -> None:
        self.asked += 1
        kernel(self.codings, self.lengths, self.counts, self.offsets, lists, self.places, self.payload)


def test_what_arrays_hold_now_counts_though_nobody_is_asked(gpu: Any) -> None:
    lists = Lists(gpu)
    lists.encode()
    lists.indices[:] = [2, 3, 4, 10, 11]
    lists.encode()
    assert lists.asked == 1
    assert lists.decode() == [2, 3, 4, 10, 11]


def test_a_large_array_is_copied_anew_and_tables_around_it_stay(gpu: Any) -> None:
    count, phase = 5000, Phase(gpu)
    payload, found = np.zeros(4 * count, np.uint8), np.zeros(count, np.uint32)
    counts, one = np.array([count], np.int64), np.zeros(1, np.int64)
    for step in range(3):
        expected = np.arange(step, step + count, dtype=np.uint32)
        payload.view(np.uint32)[:] = expected
        with phase.collecting() as started:
            replayed_calls.run(
                0,
                (payload,),
                lambda: gpu.kernels.decode_indices(
                    np.full(1, reference_indices.RAW, np.int32),
                    counts + count,
                    counts,
                    one,
                    found,
                    one,
                    payload,
                ),
            )
        started.start()
        started.finish()
        assert np.array_equal(found, expected)


@pytest.mark.parametrize("change", ["key", "array"])
def test_another_key_or_array_is_asked_for(change: str, gpu: Any) -> None:
    lists = Lists(gpu)
    lists.encode()
    if change == "array":
        lists.indices = np.array([6, 7, 8, 1, 2], np.uint32)
    lists.encode(key=int(change == "key"))
    assert lists.asked == 2
    assert lists.decode() == lists.indices.tolist()


def test_an_error_of_a_repeated_call_is_that_of_its_part(gpu: Any) -> None:
    lists = Lists(gpu)
    lists.encode()
    lists.indices[2] = 100
    with pytest.raises(ValueError, match="row 0: an index is not below the length"):
        lists.encode()
    assert lists.asked == 2
    lists.indices[2] = 9
    lists.encode()
    assert lists.asked == 3
    assert lists.decode() == [1, 5, 9, 0, 7]


def test_on_the_host_kernels_are_asked_for_every_time() -> None:
    asked: list[str] = []
    phase = Phase(HOST)
    for _ in range(2):
        with phase.collecting() as call:
            replayed_calls.run(0, (), lambda: asked.append("work"), lambda: asked.append("after"))
        call.start()
    assert asked == ["work", "after"] * 2


def test_outside_of_a_routine_it_is_done_at_once() -> None:
    asked: list[str] = []
    replayed_calls.run(0, (), lambda: asked.append("work"), lambda: asked.append("after"))
    assert asked == ["work", "after"]
