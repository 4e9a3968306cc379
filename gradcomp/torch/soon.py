"""Reads numbers from a device without waiting for it."""

from __future__ import annotations

import torch

from gradcomp.pipeline import Number
from gradcomp.torch.streams import HostStreams, Streams, streams_of


class _Copied:
    """A number of a device as of this point of the current stream; implements :class:`gradcomp.pipeline.Soon`."""

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
