"""Numbers that a device holds, on their way to the host."""

from __future__ import annotations

import torch

from gradcomp.pipeline import Number
from gradcomp.torch.streams import HostStreams, Streams, streams_of


class _Copied:
    """A number of a device as it was in the order of the current stream; see :class:`gradcomp.pipeline.Soon`."""

    def __init__(self, number: torch.Tensor, factor: float, streams: Streams) -> None:
        self._streams = streams
        self._host = self._streams.pinned(1, number.dtype)
        self._factor = factor
        streams.copy(self._host, number)
        self._event = streams.mark()

    def done(self) -> bool:
        """Whether the copy has come."""
        return self._streams.reached(self._event)

    def result(self) -> float:
        """Once it is done."""
        return self._factor * float(self._host[0])


def number_of(value: float | torch.Tensor, factor: float = 1.0) -> Number:
    """``factor`` times a number, which may be a tensor: one of a device is copied here, and nobody waits for it.

    It is what the tensor holds when the current stream comes to this point, whatever it is set to afterwards.
    """
    if isinstance(value, torch.Tensor):
        streams = streams_of(value.device)
        if not isinstance(streams, HostStreams):
            return _Copied(value, factor, streams)
    return factor * float(value)
