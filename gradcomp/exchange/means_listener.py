"""Threads of a frontend wait for the means of single layers, before the step ends."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from time import perf_counter

import numpy as np

from gradcomp.core.errors import GradcompError
from gradcomp.exchange.layout import Bucket, Layout


class MeansListener:
    """A :class:`gradcomp.exchange.settings.Listener` on which several threads may wait for means of single layers.

    A layer without a mean in the open step, since no rank had a gradient, counts as arrived with its bucket.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._slices = np.zeros(0, dtype=np.int64)  # by layer: number of slices without a mean
        self._error: GradcompError | None = None
        self._waiting = 0
        self._since = 0.0
        self.waited_seconds = 0.0  # time of the open step in which at least one thread waited

    def open(self, layout: Layout) -> None:
        """Begin a step whose layers lie in exchange buckets as ``layout`` says."""
        self._slices = np.array([len(buckets) for buckets in layout.buckets_of], dtype=np.int64)
        self.waited_seconds = 0.0

    def wait(self, layers: Sequence[int]) -> None:
        """Block until the means of these layers have arrived; raises the error of a failed exchange."""
        rows = np.array(layers, dtype=np.int64)
        with self._changed:
            if not self._waiting:
                self._since = perf_counter()
            self._waiting += 1
            self._changed.wait_for(lambda: self._error is not None or not self._slices[rows].any())
            self._waiting -= 1
            if not self._waiting:
                self.waited_seconds += perf_counter() - self._since
            if self._error is not None:
                raise self._error

    def landed(self, layer: int) -> bool:
        """Return whether the mean of this layer has arrived."""
        return not self._slices[layer]

    def bucket_complete(self, bucket: Bucket) -> None:
        with self._changed:
            self._slices[bucket.layers] -= 1
            self._changed.notify_all()

    def failed(self, error: GradcompError) -> None:
        with self._changed:
            self._error = error
            self._changed.notify_all()
