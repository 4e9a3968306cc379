"""Messages in pinned memory: which arrays lie in it, and that calls copy them without the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gradcomp.kernels import reference_indices
from gradcomp.kernels.cuda.mirrors import PinnedArray, is_pinned, pinned
from gradcomp.transport.base import wait

COUNT = 1 << 15  # indices: 128 KiB


def test_it_begins_as_zeros_and_views_lie_in_it(gpu: Any) -> None:
    made = pinned(gpu.driver, 120, [])
    assert made.tobytes() == bytes(120)
    for view in (made, made[7:], made[8:24].view(np.float32), made.reshape(3, 40)[1], made[5:5]):
        assert is_pinned(view)
    for copy in (made.copy(), made + 1, np.empty_like(made), made[[1, 2]]):
        assert isinstance(copy, PinnedArray)
        assert not is_pinned(copy)
    assert not is_pinned(np.zeros(3, np.uint8))


def coded(gpu: Any, payload: Any, decoding: bool) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Addresses and sizes of what is copied up and down, for the indices of one list and back."""
    copied: dict[str, list[tuple[int, int]]] = {"up": [], "down": []}
    driver = gpu.driver
    upload, download = driver.upload, driver.download
    driver.upload = lambda address, source: (
        copied["up"].append((source.ctypes.data, source.nbytes)),
        upload(address, source),
    )
    driver.download = lambda target, address: (
        copied["down"].append((target.ctypes.data, target.nbytes)),
        download(target, address),
    )
    count, one = np.array([len(payload) // 4], np.int64), np.zeros(1, np.int64)
    values = np.arange(len(payload) // 4, dtype=np.uint32) * 3
    kernel = gpu.kernels.decode_indices if decoding else gpu.kernels.encode_indices
    found = np.zeros_like(values) if decoding else values
    kernel(np.full(1, reference_indices.RAW, np.int32), 3 * count, count, one, found, one, payload)
    driver.upload, driver.download = upload, download
    if decoding:
        assert found.tolist() == values.tolist()
    return copied["up"], copied["down"]


def test_a_large_message_is_copied_by_the_device_alone(gpu: Any) -> None:
    payload = pinned(gpu.driver, 4 * COUNT + 16, [])[16:]
    where = (payload.ctypes.data, payload.nbytes)
    down = coded(gpu, payload, decoding=False)[1]
    assert where in down
    assert sum(size for _, size in down) < payload.nbytes + 4096
    assert payload.view(np.uint32).tolist() == (np.arange(COUNT, dtype=np.uint32) * 3).tolist()
    up, down = coded(gpu, payload, decoding=True)
    assert where in up
    assert sum(size for _, size in up) < payload.nbytes + 4096
    assert where not in down


@pytest.mark.parametrize("is_small", [True, False])
def test_a_small_message_and_other_memory_go_by_way_of_staging(is_small: bool, gpu: Any) -> None:
    payload = pinned(gpu.driver, 4000, []) if is_small else np.zeros(4 * COUNT, np.uint8)
    assert len(coded(gpu, payload, decoding=False)[1]) == 1
    assert len(coded(gpu, payload, decoding=True)[0]) == 1


def test_calls_for_pinned_and_other_memory_are_kept_apart(gpu: Any) -> None:
    for _ in range(2):
        for payload in (np.zeros(4 * COUNT, np.uint8), pinned(gpu.driver, 4 * COUNT, [])):
            copies = coded(gpu, payload, decoding=False)[1]
            assert len(copies) == 1 + is_pinned(payload)
            coded(gpu, payload, decoding=True)


def test_transports_take_it_as_it_is(gpu: Any) -> None:
    """Shared memory moves it by native code, torch.distributed as a tensor of the same memory."""
    pytest.importorskip("gradcomp._native")
    from shared_memory import join_all

    from gradcomp.transport.shm import ShmTransport

    torch = pytest.importorskip("torch")
    made = pinned(gpu.driver, 200, [])
    assert torch.from_numpy(made[8:]).data_ptr() == made.ctypes.data + 8
    first, second = join_all(2, lambda rank, meet: ShmTransport(rank, 2, meet))
    made[:100] = 7
    handles = [first.exchange([(1, made[:100])], []), second.exchange([], [(0, made[100:])])]
    for handle in handles:
        wait(handle)
    assert made.tolist() == [7] * 200
    first.close()
    second.close()
