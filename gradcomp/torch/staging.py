"""Moves gradients to the memory in which they are exchanged, and means back: in place, or through the host."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from gradcomp.kernels.devices import HOST, Device
from gradcomp.torch.streams import Streams, streams_of
from gradcomp.torch.tensors import Form


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
