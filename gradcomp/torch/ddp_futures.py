"""The futures of DDP buckets, each of which completes as soon as its layers have their means."""

# No "from __future__ import annotations": DistributedDataParallel compares the annotations of a hook with classes.

import threading
from dataclasses import dataclass

import numpy as np
import torch
from torch.futures import Future

from gradcomp.core.errors import GradcompError
from gradcomp.kernels.codec import Sizes
from gradcomp.pipeline import Bucket, Layout
from gradcomp.torch.staging import Handed, Staging


@dataclass(eq=False)
class _Pending:
    """A DDP bucket whose exchange has not ended."""

    buffer: torch.Tensor
    handed: Handed
    future: Future[torch.Tensor]
    layers: int  # number of layers that have no mean yet


class BucketFutures:
    """The futures of DDP buckets: autograd's thread adds them, the engine's thread completes them."""

    def __init__(self, layers: int, staging: Staging) -> None:
        self._staging = staging
        self._slices: Sizes = np.zeros(layers, dtype=np.int64)  # by layer: number of slices without a mean
        self._bucket_of: Sizes = np.zeros(layers, dtype=np.int64)
        self._pending: dict[int, _Pending] = {}
        self._error: GradcompError | None = None
        self._lock = threading.Lock()

    def open(self, layout: Layout) -> None:
        """Begin a step whose layers lie in exchange buckets as ``layout`` says."""
        self._slices[:] = [len(buckets) for buckets in layout.buckets_of]
        self._bucket_of[:] = -1

    def add(self, bucket: int, layers: Sizes, buffer: torch.Tensor, handed: Handed) -> Future[torch.Tensor]:
        """Return the future of a DDP bucket whose layers are about to be submitted."""
        future = future_of(buffer)
        self._bucket_of[layers] = bucket
        with self._lock:
            if self._error is not None:
                raise self._error
            self._pending[bucket] = _Pending(buffer, handed, future, len(layers))
        # DDP waits in C++, which takes an exception set from Python for a value. One raised in a callback is an error.
        return future.then(_value)

    def bucket_complete(self, bucket: Bucket) -> None:
        """Complete the DDP buckets whose last layer gets its mean with this exchange bucket."""
        self._slices[bucket.layers] -= 1
        ended = bucket.layers[self._slices[bucket.layers] == 0]
        numbers, counts = np.unique(self._bucket_of[ended], return_counts=True)
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
            pending = self._pending.get(number)
            if pending is None:
                continue  # other ranks have these layers, and this rank's DDP left them out
            pending.layers -= count
            if not pending.layers:
                with self._lock:
                    del self._pending[number]
                # A future of a device makes who waits for it wait for the stream that is current now.
                with self._staging.aside():
                    self._staging.give_back([pending.handed])
                    pending.future.set_result(pending.buffer)

    def failed(self, error: GradcompError) -> None:
        """Fail the pending DDP buckets, and those that are added later."""
        with self._lock:
            self._error = error
            pending, self._pending = self._pending, {}
        for one in pending.values():
            one.future.set_exception(error)  # type: ignore[arg-type]


def future_of(buffer: torch.Tensor) -> Future[torch.Tensor]:
    """Return a future that may hold the buffer: it must name the GPU of its value."""
    return Future(devices=[buffer.device] if buffer.is_cuda else None)


def _value(future: Future[torch.Tensor]) -> torch.Tensor:
    return future.value()
