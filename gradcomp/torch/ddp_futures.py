"""The futures of DistributedDataParallel's buckets, which complete as soon as their layers have their means."""

# DistributedDataParallel compares the annotations of what it is given with classes: they are evaluated here.

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
    """A DDP bucket under way."""

    buffer: torch.Tensor
    handed: Handed
    future: Future[torch.Tensor]
    layers: int  # without their mean


class BucketFutures:
    """The futures of DDP's buckets: entered on autograd's thread, completed on the engine's."""

    def __init__(self, layers: int, staging: Staging) -> None:
        self._staging = staging
        self._slices: Sizes = np.zeros(layers, dtype=np.int64)  # of each layer, that are not complete
        self._bucket_of: Sizes = np.zeros(layers, dtype=np.int64)
        self._pending: dict[int, _Pending] = {}
        self._error: GradcompError | None = None
        self._lock = threading.Lock()

    def open(self, layout: Layout) -> None:
        """A step begins; its layers travel as ``layout`` says."""
        self._slices[:] = [len(buckets) for buckets in layout.buckets_of]
        self._bucket_of[:] = -1

    def add(self, bucket: int, layers: Sizes, buffer: torch.Tensor, handed: Handed) -> Future[torch.Tensor]:
        """The future of a bucket whose layers are about to be submitted."""
        future = future_of(buffer)
        self._bucket_of[layers] = bucket
        with self._lock:
            if self._error is not None:
                raise self._error
            self._pending[bucket] = _Pending(buffer, handed, future, len(layers))
        # DDP waits in C++, where an exception set from Python is a value; one raised in a callback is an error.
        return future.then(_value)

    def bucket_complete(self, bucket: Bucket) -> None:
        """Complete the buckets whose last layer has its mean now."""
        self._slices[bucket.layers] -= 1
        ended = bucket.layers[self._slices[bucket.layers] == 0]
        numbers, counts = np.unique(self._bucket_of[ended], return_counts=True)
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
            pending = self._pending.get(number)
            if pending is None:
                continue  # layers that DDP left out
            pending.layers -= count
            if not pending.layers:
                with self._lock:
                    del self._pending[number]
                # Whoever waits for a future of a device waits, there, for the stream that is current now.
                with self._staging.aside():
                    self._staging.give_back([pending.handed])
                    pending.future.set_result(pending.buffer)

    def failed(self, error: GradcompError) -> None:
        """Fail the buckets under way, and those to come."""
        with self._lock:
            self._error = error
            pending, self._pending = self._pending, {}
        for one in pending.values():
            one.future.set_exception(error)  # type: ignore[arg-type]


def future_of(buffer: torch.Tensor) -> Future[torch.Tensor]:
    """One that may hold the buffer: futures name the GPUs of what they hold."""
    return Future(devices=[buffer.device] if buffer.is_cuda else None)


def _value(future: Future[torch.Tensor]) -> torch.Tensor:
    return future.value()
