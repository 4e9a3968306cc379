"""What is asked of torch for a GPU's streams, without a GPU: torch's own functions are replaced."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

import gradcomp.torch as gc
from gradcomp.core.errors import DeviceError
from gradcomp.torch.streams import CudaStreams, Streams, flat, streams_of


class Memory:
    """A tensor's, on the device or pinned."""

    def __init__(self, is_cuda: bool) -> None:
        self.is_cuda = is_cuda
        self.used_on: list[Any] = []
        self.copies: list[tuple[Any, bool]] = []

    def detach(self) -> Memory:
        return self

    def numel(self) -> int:
        return 3

    def as_strided(self, *_: Any) -> Memory:
        return self

    def copy_(self, source: Any, non_blocking: bool) -> None:
        self.copies.append((source, non_blocking))

    def record_stream(self, stream: Any) -> None:
        self.used_on.append(stream)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> CudaStreams:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"current on {device}")
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    return CudaStreams(torch.device("cuda:3"))


@pytest.mark.parametrize("down", [True, False])
def test_the_allocator_hears_who_uses_a_gradients_memory_and_nobody_waits(
    down: bool, streams: CudaStreams
) -> None:
    device, host = Memory(True), Memory(False)
    target, source = (host, device) if down else (device, host)
    streams.copy(target, source)  # type: ignore[arg-type]
    assert target.copies == [(source, True)]
    assert device.used_on == ["current on cuda:3"]
    assert host.used_on == []


def test_a_device_that_failed_is_no_event_that_has_not_come(streams: CudaStreams) -> None:
    def query() -> bool:
        raise RuntimeError("CUDA error: device-side assert triggered")

    event: Any = type("Event", (), {"query": staticmethod(query)})
    with pytest.raises(DeviceError, match="cuda:3 failed: CUDA error: device-side assert triggered"):
        streams.reached(event)


def test_a_capture_is_refused(streams: CudaStreams, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(gc.StateError, match=r"leave backward\(\) out of the capture"):
        streams.refuse_capture()


def test_a_device_has_the_same_streams_each_time() -> None:
    assert streams_of(torch.device("cuda:1")) is streams_of(torch.device("cuda:1"))
    assert streams_of(torch.device("cuda:1")) is not streams_of(torch.device("cuda:0"))
    assert type(streams_of(torch.device("cpu"))) is Streams


def test_flat_is_memory_as_it_lies() -> None:
    tensor = torch.arange(24.0).view(2, 3, 4)[1].t()
    assert flat(tensor).tolist() == list(range(12, 24))
    flat(tensor)[0] = -1.0
    assert tensor[0, 0] == -1.0
    assert flat(torch.tensor(5.0)).tolist() == [5.0]
    assert flat(torch.zeros(0, 3)).tolist() == []
