"""The order of work on a device: streams, events, and copies that the host does not wait for."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, Protocol

import torch

from gradcomp.core.errors import DeviceError, StateError


class Streams(Protocol):
    """The streams of one device; each thread has a current one, which does the work that the thread starts."""

    def refuse_capture(self) -> None:
        """Raise StateError while the current stream is captured into a graph: work started then would not run."""
        ...

    def current(self) -> Any: ...

    def handle(self) -> int:
        """Return CUDA's handle of the current stream."""
        ...

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Make a stream this thread's current one within a ``with`` block."""
        ...

    def another(self) -> Any:
        """Return a stream other than those that the script uses."""
        ...

    def external(self, handle: int) -> Any:
        """Return the stream with this CUDA handle."""
        ...

    def mark(self) -> Any:
        """Record an event behind the work that the current stream has so far."""
        ...

    def reached(self, event: Any) -> bool:
        """Return True if the event is reached, without waiting.

        Raises DeviceError, with the device's own text, if the device failed.
        """
        ...

    def follow(self, event: Any) -> None:
        """Make later work on this thread's current stream wait for the event."""
        ...

    def pinned(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Return uninitialised flat host memory, for :meth:`copy`."""
        ...

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy between the device and pinned memory on the current stream, without waiting.

        Both are dense, with elements in the same order in memory. Device memory that is freed meanwhile is
        not reused before the copy has ended.
        """
        ...


class HostStreams:
    """The CPU as a device without streams: work has ended when a call returns."""

    def refuse_capture(self) -> None:
        """Do nothing: the CPU captures no graphs."""

    def current(self) -> Any:
        return None

    def handle(self) -> int:
        return 0

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        return nullcontext(stream)

    def another(self) -> Any:
        return None

    def external(self, handle: int) -> Any:
        return None

    def mark(self) -> Any:
        return None

    def reached(self, event: Any) -> bool:
        return True

    def follow(self, event: Any) -> None:
        """Do nothing: the work has ended."""

    def pinned(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Return plain memory, because nothing copies from it asynchronously."""
        return torch.empty(elements, dtype=dtype)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        flat(target).copy_(flat(source))


class CudaStreams:
    """The streams of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def refuse_capture(self) -> None:
        """Check the thread's current device, which in a hook is the gradient's."""
        if torch.cuda.is_current_stream_capturing():
            raise StateError(
                "a CUDA graph is being captured, and an exchange cannot be a part of one: leave backward() out of the "
                "capture"
            )

    def current(self) -> Any:
        """Return torch's own object, which keeps the stream alive."""
        return torch.cuda.current_stream(self._device)

    def handle(self) -> int:
        """Return the current stream's handle; 0 is the default stream."""
        return int(self.current().cuda_stream)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Make the stream and its device current."""
        return torch.cuda.stream(stream)

    def another(self) -> Any:
        """Take a stream from torch's pool; such streams do not wait for the default stream."""
        return torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def external(self, handle: int) -> Any:
        """Wrap a stream by its handle; the stream's owner keeps it alive."""
        return torch.cuda.ExternalStream(handle, self._device)  # type: ignore[no-untyped-call]

    def mark(self) -> Any:
        """Record an event without timing."""
        return self.current().record_event()

    def reached(self, event: Any) -> bool:
        """Query the event with its device as the current one, so that no context is created on device 0."""
        try:
            with torch.cuda.device(self._device):
                return bool(event.query())
        except RuntimeError as error:
            raise DeviceError(f"{self._device} failed: {error}") from error

    def follow(self, event: Any) -> None:
        """Make the stream wait for the event; the host does not wait."""
        self.current().wait_event(event)

    def pinned(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Allocate from torch's cache, which reuses no memory before the copies from or to it have ended."""
        with torch.cuda.device(self._device):
            return torch.empty(elements, dtype=dtype, pin_memory=True)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy, and tell torch's allocator which stream uses memory that was allocated for another one."""
        stream = self.current()
        with torch.cuda.stream(stream):
            flat(target).copy_(flat(source), non_blocking=True)
        (target if target.is_cuda else source).record_stream(stream)


_HOST: Streams = HostStreams()


@cache
def _cuda(device: torch.device) -> Streams:
    return CudaStreams(device)


def streams_of(device: torch.device) -> Streams:
    """Return the device's streams; a CUDA device must have an index."""
    return _cuda(device) if device.type == "cuda" else _HOST


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """View the elements of a dense tensor in the order in which they lie in memory."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))
