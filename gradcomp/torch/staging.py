"""Where gradients are exchanged: in their own memory, or in copies on the host, and how means come back."""

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
    """A gradient as the engine has it: ``tensor`` holds its values once ``event`` has come, and then its mean.

    Whoever holds this holds the memory of both. ``gradient``: the gradient's own tensor, where the mean is to be in the
    end; None if there is none yet.
    """

    tensor: torch.Tensor
    event: Any
    gradient: torch.Tensor | None

    @property
    def address(self) -> int:
        """Of the values."""
        return int(self.tensor.data_ptr())


class Staging(Protocol):
    """How gradients come to the kernels, and means to the script, each in the order of the script's stream."""

    def open(self) -> None:
        """An exchange begins, on a thread of the script's: its current stream is remembered as the script's.

        StateError while it is captured into a graph.
        """
        ...

    def hand_in(self, gradient: torch.Tensor) -> Handed:
        """A gradient that the current stream computes; its memory is dense."""
        ...

    def allocate(self, form: Form, gradient: torch.Tensor | None) -> Handed:
        """Room for a mean of this form, whoever's thread it is; ``gradient``: a dense tensor of the form, if any."""
        ...

    def give_back(self, handed: Iterable[Handed]) -> None:
        """What the current stream does from now on to the gradients finds their means."""
        ...

    def finished(self, made: Handed, form: Form) -> torch.Tensor:
        """The tensor with the mean that :meth:`made` was made for; as for :meth:`give_back`."""
        ...

    def aside(self) -> AbstractContextManager[Any]:
        """Make a stream current that is behind the means, and that no work of the script's holds up."""
        ...


class InPlace:
    """Kernels read gradients, and write means, where they lie: on the CPU, or on a device that has kernels of ours.

    A gradient's memory cannot be used for anything else meanwhile: the engine holds what was handed in until the
    exchange is done.
    """

    def __init__(self, device: Device, streams: Streams) -> None:
        self._device = device
        self._streams = streams
        self._scripts: Any = None  # the stream on which the script trains
        self._ours: Any = None if device.driver is None else streams.external(device.driver.stream)

    def open(self) -> None:
        """See :meth:`Staging.open`."""
        self._streams.refuse_capture()
        self._scripts = self._streams.current()

    def hand_in(self, gradient: torch.Tensor) -> Handed:
        """The event is behind what computes it."""
        return Handed(gradient, self._device.mark(self._streams.handle()), gradient)

    def allocate(self, form: Form, gradient: torch.Tensor | None) -> Handed:
        """On the script's stream, where it was zeroed last, and where its memory is used again; then comes the mean."""
        with self._streams.on(self._scripts):
            if gradient is None:
                gradient = form.zeros()
            self._device.follow([self._device.mark(self._streams.handle())])
        return Handed(gradient, None, gradient)

    def give_back(self, handed: Iterable[Handed]) -> None:
        """The current stream comes behind the kernels'."""
        if self._ours is not None:
            with self._streams.on(self._ours):
                event = self._streams.mark()
            self._streams.follow(event)

    def finished(self, made: Handed, form: Form) -> torch.Tensor:
        """Its own memory."""
        return made.tensor

    def aside(self) -> AbstractContextManager[Any]:
        """The kernels' own stream."""
        return self._streams.on(self._ours)


class ThroughHost:
    """The host's kernels work on copies in pinned memory.

    Copies to the host have a stream of their own, behind the one that computes the gradient: neither does a copy hold
    up the script's next kernel, nor does it wait for more than its gradient. Copies back go in the order of whoever
    asks for them, or beside the script, under :meth:`aside`.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._down, self._up = streams.another(), streams.another()

    def open(self) -> None:
        """Nothing that another thread starts is on a stream of the script's."""
        self._streams.refuse_capture()

    def hand_in(self, gradient: torch.Tensor) -> Handed:
        """The event is behind the copy."""
        streams = self._streams
        host = streams.pinned(gradient.numel(), gradient.dtype)
        computed = streams.mark()
        with streams.on(self._down):
            streams.follow(computed)
            streams.copy(host, gradient)
            return Handed(host, streams.mark(), gradient)

    def allocate(self, form: Form, gradient: torch.Tensor | None) -> Handed:
        """On the host only."""
        return Handed(self._streams.pinned(form.shape.numel(), form.dtype), None, gradient)

    def give_back(self, handed: Iterable[Handed]) -> None:
        """On the current stream."""
        for each in handed:
            assert each.gradient is not None, "it was handed in"
            self._streams.copy(each.gradient, each.tensor)

    def finished(self, made: Handed, form: Form) -> torch.Tensor:
        """On the current stream, too."""
        gradient = form.empty() if made.gradient is None else made.gradient
        self._streams.copy(gradient, made.tensor)
        return gradient

    def aside(self) -> AbstractContextManager[Any]:
        """A stream for copies to the device."""
        return self._streams.on(self._up)


@dataclass(frozen=True)
class Staged(Device):
    """A device without kernels of ours: for the engine its gradients are the host's, and come with events."""

    streams: Streams | None = None

    @property
    def is_late(self) -> bool:
        """Copies take time."""
        return True

    def reached(self, events: Iterable[Any]) -> bool:
        """Whether the copies have come."""
        assert self.streams is not None, "staged() names them"
        return all(event is None or self.streams.reached(event) for event in events)


def staged(device: torch.device) -> Device:
    """The device, without kernels of ours."""
    return Staged(str(device), streams=streams_of(device))


def staging_for(device: Device, of: torch.device) -> Staging:
    """How gradients of torch's device ``of`` are exchanged where ``device`` is the engine's."""
    if isinstance(device, Staged) and device.streams is not None:
        return ThroughHost(device.streams)
    return InPlace(device, streams_of(of))


def untouched() -> Staging:
    """Of who exchanges nothing."""
    return InPlace(HOST, streams_of(torch.device("cpu")))
