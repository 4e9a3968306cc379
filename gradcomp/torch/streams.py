"""The streams of devices, and numbers that are copied from a device without a wait."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch

from gradcomp.core.errors import DeviceError, StateError
from gradcomp.exchange.waiting import Number


class Streams:
    """The streams of one device; each thread has a current one, which does the work that the thread starts.

    This class is the CPU as a device without streams: work has ended when a call returns.
    """

    def refuse_capture(self) -> None:
        """Raise StateError while the current stream is captured into a graph: work started then would not run."""

    def current(self) -> Any:
        return None

    def handle(self) -> int:
        """Return CUDA's handle of the current stream; 0 is the default stream."""
        return 0

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Make a stream, and its device, this thread's current one within a ``with`` block."""
        return nullcontext(stream)

    def another(self) -> Any:
        """Return a stream other than those that the script uses."""
        return None

    def external(self, handle: int) -> Any:
        """Return the stream with this CUDA handle; its owner keeps it alive."""
        return None

    def mark(self) -> Any:
        """Record an event after the present work of the current stream."""
        return None

    def reached(self, event: Any) -> bool:
        """Return True if the event is reached, without waiting.

        Raises DeviceError, with the device's own text, if the device failed.
        """
        return True

    def follow(self, event: Any) -> None:
        """Make later work on this thread's current stream wait for the event; the host does not wait."""

    def pinned(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Return uninitialised flat host memory, for :meth:`copy`."""
        return torch.empty(elements, dtype=dtype)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy between the device and pinned memory on the current stream, without waiting.

        Both are dense, with elements in the same order in memory. Device memory that is freed meanwhile is
        not reused before the copy has ended.
        """
        flat(target).copy_(flat(source))


class CudaStreams(Streams):
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
        return int(self.current().cuda_stream)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def another(self) -> Any:
        """Take a stream from torch's pool; such streams do not wait for the default stream."""
        return torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def external(self, handle: int) -> Any:
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


_HOST = Streams()
_cuda = cache(CudaStreams)


def streams_of(device: torch.device) -> Streams:
    """Return the device's streams; a CUDA device must have an index."""
    return _cuda(device) if device.type == "cuda" else _HOST


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """View the elements of a dense tensor in the order in which they lie in memory."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


class _Copied:
    """A number of a device as of this point of the stream, a :class:`gradcomp.exchange.waiting.DeferredScalar`."""

    def __init__(self, number: torch.Tensor, factor: float, streams: Streams) -> None:
        self._streams = streams
        self._host = streams.pinned(1, number.dtype)
        self._factor = factor
        streams.copy(self._host, number)
        self._event = streams.mark()

    def done(self) -> bool:
        return self._streams.reached(self._event)

    def result(self) -> float:
        return self._factor * float(self._host[0])


def number_of(value: float | torch.Tensor, factor: float = 1.0) -> Number:
    """Return ``factor`` times a number; a tensor on a device is copied to the host without waiting for it.

    The value is that of the tensor at this point of the current stream, whatever the tensor is set to
    afterwards.
    """
    if isinstance(value, torch.Tensor):
        streams = streams_of(value.device)
        if streams is not _HOST:
            return _Copied(value, factor, streams)
    return factor * float(value)
