"""This step's memory, as a reduction sees it: addresses of gradients, residuals and outputs for whole tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter

import numpy as np
import numpy.typing as npt

from gradcomp.core.header import Ballot
from gradcomp.core.state import Residuals
from gradcomp.core.statistics import Statistics, Trace
from gradcomp.kernels.codec import Sizes, Table
from gradcomp.kernels.segments import DTYPES
from gradcomp.pipeline.inbox import Inbox
from gradcomp.pipeline.layout import Bucket

Addresses = npt.NDArray[np.uint64]

_ITEM_BYTES = np.array([dtype.itemsize for dtype in DTYPES], dtype=np.uint64)

#: Makes room for the mean of a layer that this rank has no gradient of; returns the address.
Allocate = Callable[[int], int]


class StepMemory:
    """The :class:`gradcomp.reduce.Binding` of one bucket in one step."""

    def __init__(
        self,
        bucket: Bucket,
        step: int,
        ballot: Ballot,
        inbox: Inbox,
        residuals: Residuals,
        allocate: Allocate,
        trace: Trace,
        statistics: Statistics,
    ) -> None:
        self._bucket = bucket
        self._step = step
        self._ballot = ballot
        self._inbox = inbox
        self._residuals = residuals
        self._allocate = allocate
        self._trace = trace
        self._statistics = statistics
        self._outputs_ready = False

    def sources(self, table: Table, layers: Sizes, feedback: bool) -> None:
        """Gradient, residual and shadow; an absent gradient has address 0 and counts as zero."""
        table["gradient"] = _at(self._inbox.gradients[layers], table)
        if feedback:
            table["residual"] = self._residuals.first.read_addresses(layers, table["start"])
            table["shadow"] = self._residuals.first.write_addresses(layers, table["start"])

    def owned(self, table: Table, rows: Sizes) -> None:
        """Residual and shadow of the second stage; a range starts where its row starts."""
        zero = np.zeros(len(rows), dtype=np.int64)
        table["residual"] = self._residuals.second.read_addresses(rows, zero)
        table["shadow"] = self._residuals.second.write_addresses(rows, zero)

    def outputs(self, table: Table, layers: Sizes) -> None:
        """Outputs of the layers that some rank had; the others stay as they are."""
        self._make_room()
        table["output"] = _at(self._inbox.outputs[layers], table)

    def _make_room(self) -> None:
        if self._outputs_ready:
            return
        self._outputs_ready = True
        present = self._ballot.present
        addresses = self._inbox.outputs
        layers = self._bucket.layers
        addresses[layers[~present]] = 0
        for layer in layers[present & (addresses[layers] == 0)].tolist():
            addresses[layer] = self._allocate(layer)

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Codec time: into the trace and the statistics."""
        begin = perf_counter()
        yield
        end = perf_counter()
        self._statistics.codec_seconds += end - begin
        self._trace.add(name, self._step, self._bucket.number, begin, end)


def _at(bases: Addresses, table: Table) -> Addresses:
    """Addresses of the segments' first elements in arrays that start at ``bases``; 0 stays 0."""
    offsets = table["start"].astype(np.uint64) * _ITEM_BYTES[table["dtype"]]
    return np.where(bases == 0, bases, bases + offsets)
