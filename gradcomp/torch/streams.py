"""Streams and copies: gradients reach the memory in which they are exchanged, and means come back, without waits."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch

from gradcomp.core.errors import DeviceError, StateError
from gradcomp.exchange.waiting import Number
from gradcomp.kernels.devices import HOST, Device
from gradcomp.torch.tensors import Form


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


class _Copied:
    """A number of a device as of this point of the stream, a :class:`gradcomp.exchange.waiting.DeferredScalar`."""

    def __init__(self, number: torch.Tensor, factor: float, streams: Streams) -> None:
        self._streams = streams
        self._host = self._streams.pinned(1, number.dtype)
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
        if not isinstance(streams, HostStreams):
            return _Copied(value, factor, streams)
    return factor * float(value)


class Handed(NamedTuple):
    """A gradient that the engine has: ``tensor`` holds its values once ``event`` is reached, and later its mean.

    This object keeps the memory of both alive. ``gradient`` is the gradient's own tensor, which the mean is
    written to in the end; None if there is none yet.
    """

    tensor: torch.Tensor
    event: Any
    gradient: torch.Tensor | None

    @property
    def address(self) -> int:
        """The address of the values."""
        return int(self.tensor.data_ptr())


class Staging(Protocol):
    """Brings gradients to the kernels, and means to the script, each in the order of the script's stream."""

    def open(self) -> None:
        """Begin an exchange on one of the script's threads, and remember its current stream as the script's.

        Raises StateError while that stream is captured into a graph.
        """
        ...

    def hand_in(self, gradient: torch.Tensor) -> Handed:
        """Take a gradient that the current stream computes; its memory is dense."""
        ...

    def allocate(self, form: Form, gradient: torch.Tensor | None) -> Handed:
        """Allocate memory for a mean of this form, on any thread.

        ``gradient`` is the dense gradient that gets the mean, if there is one.
        """
        ...

    def give_back(self, handed: Iterable[Handed]) -> None:
        """Make later work of the current stream on these gradients see their means."""
        ...

    def finished(self, made: Handed, form: Form) -> torch.Tensor:
        """Return the tensor with the mean for which ``made`` was allocated, in order as for :meth:`give_back`."""
        ...

    def aside(self) -> AbstractContextManager[Any]:
        """Make a stream current that follows the means and waits for no work of the script's."""
        ...


class InPlace:
    """Kernels read gradients, and write means, where they lie: on the CPU, or on a device that has kernels.

    A gradient's memory cannot be reused meanwhile, because the engine holds the tensors until the exchange
    ends.
    """

    def __init__(self, device: Device, streams: Streams) -> None:
        self._device = device
        self._streams = streams
        self._scripts: Any = None  # the stream on which the script trains
        self._ours: Any = None if device.driver is None else streams.external(device.driver.stream)

    def open(self) -> None:
        self._streams.refuse_capture()
        self._scripts = self._streams.current()

    def hand_in(self, gradient: torch.Tensor) -> Handed:
        """Take the gradient itself; the event follows the work that computes it."""
        return Handed(gradient, self._device.mark(self._streams.handle()), gradient)

    def allocate(self, form: Form, gradient: torch.Tensor | None) -> Handed:
        """Take the gradient, or zeros made on the script's stream; the kernels write the mean behind them.

        The script's stream is the one that last zeroed the gradient and that will use its memory again.
        """
        with self._streams.on(self._scripts):
            if gradient is None:
                gradient = form.zeros()
            self._device.follow([self._device.mark(self._streams.handle())])
        return Handed(gradient, None, gradient)

    def give_back(self, handed: Iterable[Handed]) -> None:
        """Make the current stream wait for the kernels' stream."""
        if self._ours is not None:
            with self._streams.on(self._ours):
                event = self._streams.mark()
            self._streams.follow(event)

    def finished(self, made: Handed, form: Form) -> torch.Tensor:
        return made.tensor

    def aside(self) -> AbstractContextManager[Any]:
        return self._streams.on(self._ours)


class ThroughHost:
    """The host's kernels work on copies in pinned memory.

    Copies to the host have a stream of their own, behind the one that computes the gradient. So a copy does
    not delay the script's next kernel, and waits for its own gradient only. Copies back run on the caller's
    current stream, or beside the script under :meth:`aside`.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._down, self._up = streams.another(), streams.another()

    def open(self) -> None:
        """Refuse graph capture; no stream is remembered, because other threads start nothing on the script's."""
        self._streams.refuse_capture()

    def hand_in(self, gradient: torch.Tensor) -> Handed:
        """Copy the gradient to the host; the event follows the copy."""
        streams = self._streams
        host = streams.pinned(gradient.numel(), gradient.dtype)
        computed = streams.mark()
        with streams.on(self._down):
            streams.follow(computed)
            streams.copy(host, gradient)
            return Handed(host, streams.mark(), gradient)

    def allocate(self, form: Form, gradient: torch.Tensor | None) -> Handed:
        """Allocate the mean's memory on the host only; :meth:`finished` allocates a gradient."""
        return Handed(self._streams.pinned(form.shape.numel(), form.dtype), None, gradient)

    def give_back(self, handed: Iterable[Handed]) -> None:
        """Copy the means to the device on the current stream."""
        for each in handed:
            assert each.gradient is not None, "it was handed in"
            self._streams.copy(each.gradient, each.tensor)

    def finished(self, made: Handed, form: Form) -> torch.Tensor:
        """Copy the mean to its gradient, or to a new one, on the current stream."""
        gradient = form.empty() if made.gradient is None else made.gradient
        self._streams.copy(gradient, made.tensor)
        return gradient

    def aside(self) -> AbstractContextManager[Any]:
        """Make the stream for copies to the device current."""
        return self._streams.on(self._up)


@dataclass(frozen=True)
class Staged(Device):
    """A device without kernels, whose gradients the engine sees as the host's, with events to wait for."""

    streams: Streams | None = None

    @property
    def is_late(self) -> bool:
        """Always true, because copies take time."""
        return True

    def reached(self, events: Iterable[Any]) -> bool:
        """Return True if the copies have ended."""
        assert self.streams is not None, "staged() names them"
        return all(event is None or self.streams.reached(event) for event in events)


def staged(device: torch.device) -> Device:
    return Staged(str(device), streams=streams_of(device))


def staging_for(device: Device, of: torch.device) -> Staging:
    """Return the staging of gradients on torch's device ``of``, where ``device`` is the engine's."""
    if isinstance(device, Staged) and device.streams is not None:
        return ThroughHost(device.streams)
    return InPlace(device, streams_of(of))


def untouched() -> Staging:
    """Return the staging of a rank that exchanges nothing."""
    return InPlace(HOST, streams_of(torch.device("cpu")))
