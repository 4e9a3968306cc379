"""The order of work on a device, as torch keeps it: streams, events, and copies that this program does not wait for."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, Protocol

import torch

from gradcomp.core.errors import DeviceError, StateError


class Streams(Protocol):
    """The streams of one device. Each thread has a current one, on which the work that it starts is done."""

    def refuse_capture(self) -> None:
        """StateError while the current stream is captured into a graph: what is started then does not run."""
        ...

    def current(self) -> Any:
        """This thread's current stream."""
        ...

    def handle(self) -> int:
        """CUDA's handle of it."""
        ...

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Make a stream this thread's current one, for a ``with`` block."""
        ...

    def another(self) -> Any:
        """A stream beside those that the script uses."""
        ...

    def external(self, handle: int) -> Any:
        """The stream that CUDA knows by this handle."""
        ...

    def mark(self) -> Any:
        """An event behind what the current stream holds by now."""
        ...

    def reached(self, event: Any) -> bool:
        """Whether the event has come; does not wait. DeviceError, with the device's own text, if the device failed."""
        ...

    def follow(self, event: Any) -> None:
        """What this thread starts on the current stream from now on begins behind the event."""
        ...

    def pinned(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Flat memory of the host, of undefined content, for :meth:`copy`."""
        ...

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy between the device and pinned memory, on the current stream, without a wait.

        Both are dense, with elements in the same order in memory. Memory of the device that either gives back meanwhile
        is not used for anything else before the copy is done.
        """
        ...


class HostStreams:
    """The CPU's: work is done when a call returns."""

    def refuse_capture(self) -> None:
        """There are no graphs."""

    def current(self) -> Any:
        """None."""
        return None

    def handle(self) -> int:
        """0."""
        return 0

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Changes nothing."""
        return nullcontext(stream)

    def another(self) -> Any:
        """None."""
        return None

    def external(self, handle: int) -> Any:
        """None."""
        return None

    def mark(self) -> Any:
        """None."""
        return None

    def reached(self, event: Any) -> bool:
        """True."""
        return True

    def follow(self, event: Any) -> None:
        """There is nothing to wait for."""

    def pinned(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Plain memory."""
        return torch.empty(elements, dtype=dtype)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Done on return."""
        flat(target).copy_(flat(source))


class CudaStreams:
    """Those of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def refuse_capture(self) -> None:
        """Asked of the thread's current device: in a hook it is the gradient's."""
        if torch.cuda.is_current_stream_capturing():
            raise StateError(
                "a CUDA graph is being captured, and an exchange cannot be a part of one: leave backward() out of the "
                "capture"
            )

    def current(self) -> Any:
        """torch's own object, which keeps the stream alive."""
        return torch.cuda.current_stream(self._device)

    def handle(self) -> int:
        """0 is the default stream's."""
        return int(self.current().cuda_stream)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """The device becomes the current one too."""
        return torch.cuda.stream(stream)

    def another(self) -> Any:
        """From torch's pool; it does not wait for the default stream."""
        return torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def external(self, handle: int) -> Any:
        """Whoever made it keeps it alive."""
        return torch.cuda.ExternalStream(handle, self._device)  # type: ignore[no-untyped-call]

    def mark(self) -> Any:
        """Without a time."""
        return self.current().record_event()

    def reached(self, event: Any) -> bool:
        """Asked with the device as the current one: a thread of ours must not begin a context on device 0."""
        try:
            with torch.cuda.device(self._device):
                return bool(event.query())
        except RuntimeError as error:
            raise DeviceError(f"{self._device} failed: {error}") from error

    def follow(self, event: Any) -> None:
        """The stream waits, the program does not."""
        self.current().wait_event(event)

    def pinned(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """From torch's cache, which gives nothing out again before the copies that use it are done."""
        with torch.cuda.device(self._device):
            return torch.empty(elements, dtype=dtype, pin_memory=True)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """torch's allocator hears which stream uses memory that it made for another one."""
        stream = self.current()
        with torch.cuda.stream(stream):
            flat(target).copy_(flat(source), non_blocking=True)
        (target if target.is_cuda else source).record_stream(stream)


_HOST: Streams = HostStreams()


@cache
def _cuda(device: torch.device) -> Streams:
    return CudaStreams(device)


def streams_of(device: torch.device) -> Streams:
    """The device's streams; a CUDA device has a number here."""
    return _cuda(device) if device.type == "cuda" else _HOST


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a dense tensor, in the order in which they lie in memory."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))
