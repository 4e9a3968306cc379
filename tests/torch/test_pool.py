"""Memory for a GPU's kernels out of PyTorch's allocator; its functions are stood in for."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from gradcomp.kernels import devices
from gradcomp.kernels.cuda import driver
from gradcomp.torch import devices as torch_devices
from gradcomp.torch.devices import TorchPool


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    noted: list[Any] = []
    monkeypatch.setattr(torch.cuda, "caching_allocator_alloc", lambda *given: (noted.append(given), 4096)[1])
    monkeypatch.setattr(torch.cuda, "caching_allocator_delete", noted.append)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda index: 100 + index)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda index: 50 + index)
    return noted


def test_memory_is_of_the_stream_and_goes_back_with_its_last_reference(calls: list[Any]) -> None:
    block = TorchPool(3).allocate(1000, 77)
    assert block.address == 4096
    assert calls == [(1000, 3, 77)]
    del block
    gc.collect()
    assert calls[1:] == [4096]


def test_a_full_device_is_a_memory_error(calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> int:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.cuda, "caching_allocator_alloc", full)
    with pytest.raises(MemoryError, match="CUDA out of memory"):
        TorchPool(0).allocate(8, 0)


def test_the_allocator_says_what_it_holds(calls: list[Any]) -> None:
    assert TorchPool(1).describe() == "PyTorch's allocator holds 101 bytes, 51 of them in use"


def test_a_device_of_torch_parameters_takes_torch_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    class Parameter:
        device = "cuda:2"

    monkeypatch.setattr(driver, "_lent", {})
    monkeypatch.setattr(devices, "cuda", driver.lent_to)
    named: Any = [("weight", Parameter())]
    assert isinstance(torch_devices.device_of(named), TorchPool)
    assert driver.lent_to(0) is None
