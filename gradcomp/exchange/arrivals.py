"""Arrivals record the gradients submitted in the current step, and which exchange buckets are complete."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gradcomp.core.errors import StateError
from gradcomp.core.layers import LayerSpec
from gradcomp.exchange.layout import Layout
from gradcomp.kernels.codec import Sizes, Table
from gradcomp.kernels.devices import HOST, Device
from gradcomp.kernels.segments import DTYPE_NUMBERS, SEGMENT
from gradcomp.reduce.header import PRESENT, SPARSE

Addresses = npt.NDArray[np.uint64]


class Submission(NamedTuple):
    """Reports a layer's gradient at address ``gradient``, and the address ``output`` for its mean.

    ``keep`` is an object that is kept alive until the step ends. ``event`` is the device event after which the gradient
    may be read; None: at once. With ``zero_is_absent`` a gradient that is all zeros counts as absent;
    :meth:`Arrivals.decide` checks that.
    """

    layer: int
    gradient: int
    output: int
    keep: object = None
    event: object = None
    zero_is_absent: bool = False


class Arrivals:
    """Records addresses and header states of the layers that were submitted, and which exchange buckets are complete.

    One thread at a time submits. The engine's thread reads a bucket's entries once it is :meth:`ready`. No lock
    is held, so the count of a bucket's missing layers is written last. A bucket is complete when all its layers were
    submitted, or at the flush.
    """

    def __init__(self, layers: Sequence[LayerSpec], device: Device = HOST) -> None:
        self._layers, self._device = layers, device
        self.gradients = np.zeros(len(layers), dtype=np.uint64)
        self.outputs = np.zeros(len(layers), dtype=np.uint64)
        self.states = np.zeros(len(layers), dtype=np.uint8)
        self._doubtful = np.zeros(len(layers), dtype=np.bool_)  # absent if their gradient is zero
        self._whole: Table = np.zeros(len(layers), dtype=SEGMENT)
        self._whole["length"] = [layer.size for layer in layers]
        self._whole["dtype"] = [DTYPE_NUMBERS[layer.dtype] for layer in layers]
        self.order: list[int] = []
        self.events: list[Any] = [None] * len(layers)  # device events after which the gradients may be read
        self.flushed = True  # no step is open
        self._keep: list[object] = []
        self.completed: list[float] = []  # when each bucket became complete, on time.perf_counter's clock
        self._missing: list[int] = []
        self._layout = Layout((), ())
        self._reported = np.zeros(len(layers), dtype=np.bool_)
        #: Called when a bucket becomes complete, other than by the flush.
        self.bucket_complete: Callable[[], None] = lambda: None

    def open(self, layout: Layout) -> None:
        """Clear the arrivals of the last step, and expect the layers of ``layout``."""
        self.gradients[:] = 0
        self.outputs[:] = 0
        self.states[:] = 0
        self._doubtful[:] = False
        self.events = [None] * len(self._layers)
        self.order = []
        self.flushed = False
        self._keep = []
        self._missing = layout.layer_counts.copy()
        self.completed = [0.0] * len(layout.buckets)
        self._layout = layout
        self._reported[:] = False

    def submit(self, submission: Submission, state: int = PRESENT) -> None:
        """Report a layer's gradient; ``state`` is SPARSE or 0 if it has no dense one."""
        layer = submission.layer
        if self.flushed or self._reported[layer]:
            raise self._refused(layer)
        self._reported[layer] = True
        self.states[layer] = state
        self.gradients[layer], self.outputs[layer] = submission.gradient, submission.output
        self.events[layer], self._doubtful[layer] = submission.event, submission.zero_is_absent
        self._keep.append(submission.keep)
        self.order.append(layer)
        self._count([(bucket, 1) for bucket in self._layout.buckets_of[layer]])

    def submit_all(
        self,
        layers: list[int],
        addresses: Addresses,
        keep: object,
        event: object = None,
        *,
        zero_is_absent: bool = False,
    ) -> None:
        """Report dense gradients whose means replace them, at the cost of one; see :class:`Submission`."""
        given = np.array(layers, dtype=np.int64)
        times = np.bincount(given, minlength=len(self._layers)) + self._reported
        if layers and (self.flushed or times[given].max() > 1):
            raise self._refused(layers[int(times[given].argmax())])
        self._reported[given] = True
        self.states[given] = PRESENT
        self.gradients[given] = self.outputs[given] = addresses
        self._doubtful[given] = zero_is_absent
        if event is not None:
            for layer in layers:
                self.events[layer] = event
        self._keep.append(keep)
        self.order += layers
        buckets = self._layout.bucket_of[given]
        counts = np.bincount(buckets, minlength=len(self.completed) + 1)
        for layer in given[buckets == len(self.completed)].tolist():
            np.add.at(counts, list(self._layout.buckets_of[layer]), 1)
        self._count([(bucket, int(counts[bucket])) for bucket in counts[:-1].nonzero()[0].tolist()])

    def _refused(self, layer: int) -> StateError:
        """Return the error for a gradient that comes when no step is open, or for the second time."""
        why = "has a gradient after its step closed" if self.flushed else "was submitted twice in one step"
        return StateError(f"layer {self._layers[layer].name!r} {why}")

    def _count(self, arrived: Iterable[tuple[int, int]]) -> None:
        """Count the layers that arrived, by bucket; this follows all else about them."""
        complete = False
        for bucket, layers in arrived:
            if self._missing[bucket] == layers:
                # The time is set before the count, because the engine's thread reads the count first.
                self.completed[bucket] = perf_counter()
                complete = True
            self._missing[bucket] -= layers
        if complete:
            self.bucket_complete()

    def submit_absent(self, layer: int, *, sparse: bool = False, output: int = 0) -> None:
        """Report a layer without a dense gradient in this step.

        ``output``: the address for the mean of the other ranks' gradients; 0: it is allocated if there is one.
        """
        self.submit(Submission(layer, 0, output), SPARSE if sparse else 0)

    def decide(self, layers: Sizes) -> None:
        """Mark those of ``layers`` as absent that have ``zero_is_absent`` and a gradient of zeros. All are ready."""
        doubtful = layers[self._doubtful[layers]]
        if not len(doubtful):
            return
        table = self._whole[doubtful]
        table["gradient"] = self.gradients[doubtful]
        has_value = np.zeros(len(table), dtype=np.uint8)
        self._device.kernels.nonzero(table, has_value)
        absent = doubtful[has_value == 0]
        self.states[absent] = 0
        self.gradients[absent] = 0
        self._doubtful[doubtful] = False

    def flush(self) -> None:
        """Complete all buckets: no more layers will report in this step."""
        now = perf_counter()
        for bucket, at in enumerate(self.completed):
            if not at:
                self.completed[bucket] = now
        self.flushed = True

    def ready(self, bucket: int) -> bool:
        return self.flushed or self._missing[bucket] == 0

    @property
    def complete(self) -> bool:
        """Return whether all buckets are complete."""
        return self.flushed or not any(self._missing)

    def release(self) -> None:
        """Drop the references to the submitted arrays."""
        self._keep = []
