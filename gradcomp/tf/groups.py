"""Groups of the gradients of one call of ``exchange``, and the wait for their means."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import Any

import numpy as np
import tensorflow as tf

from gradcomp.core.errors import GradcompError
from gradcomp.exchange.layout import Bucket, Layout

#: For each variable a tensor, ``tf.IndexedSlices``, or None.
Gradients = list[Any]


class Site:
    """A call of ``exchange``: layers by number, and the groups in which they are submitted.

    ``absent`` lists layers without a gradient, ``sparse`` those with ``tf.IndexedSlices``. ``rows`` and ``dense`` list
    for each group its layers with ``tf.IndexedSlices`` and with tensors.
    """

    def __init__(self, gradients: Gradients, groups: Sequence[Sequence[int]]) -> None:
        self._gradients = dict(enumerate(gradients))
        self.absent = [layer for layer, gradient in enumerate(gradients) if gradient is None]
        sparse = {layer for layer, each in enumerate(gradients) if isinstance(each, tf.IndexedSlices)}
        self.rows = [[layer for layer in group if layer in sparse] for group in groups]
        self.dense = [[layer for layer in group if layer not in sparse] for group in groups]
        self.sparse = [layer for group in self.rows for layer in group]

    def inputs(self, number: int) -> tuple[list[Any], list[Any]]:
        """Return the tensors of the group's sparse gradients, and of its dense ones; drops the references to them."""
        slices = [self._gradients.pop(layer) for layer in self.rows[number]]
        rows = [tensor for each in slices for tensor in (each.indices, each.values)]
        return rows, [self._gradients.pop(layer) for layer in self.dense[number]]

    def take(self, number: int, values: Sequence[Any]) -> Iterator[tuple[int, Sequence[Any]]]:
        """Yield the group's layers with the values of their tensors, which are in the order of :meth:`inputs`."""
        for place, layer in enumerate(self.rows[number]):
            yield layer, values[2 * place : 2 * place + 2]
        for layer, value in zip(self.dense[number], values[2 * len(self.rows[number]) :], strict=True):
            yield layer, (value,)


def groups_of(gradients: Gradients, shapes: Sequence[Sequence[int]], group_elements: int) -> list[list[int]]:
    """Group layers in the order in which the graph makes their gradients.

    A group ends once it has ``group_elements`` elements. There is at least one group, because one must open
    the exchange.
    """
    graphs: list[Any] = []  # from the innermost
    graph = tf.compat.v1.get_default_graph()
    while graph is not None and graph not in graphs:
        graphs.append(graph)
        graph = getattr(graph, "outer_graph", None)
    places = {
        op: (-depth, number)
        for depth, graph in enumerate(graphs)
        for number, op in enumerate(graph.get_operations())
    }

    def place(layer: int) -> tuple[int, int]:
        # An eager tensor has no op, and was there before all graphs.
        return places.get(getattr(gradients[layer], "op", None), (-len(graphs), 0))

    groups: list[list[int]] = [[]]
    elements = 0
    for layer in sorted((i for i, gradient in enumerate(gradients) if gradient is not None), key=place):
        if elements >= group_elements:
            groups.append([])
            elements = 0
        groups[-1].append(layer)
        elements += math.prod(shapes[layer])
    return groups


class MeansListener:
    """A :class:`gradcomp.exchange.settings.Listener` on which several threads may wait."""

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

    def bucket_complete(self, bucket: Bucket) -> None:
        with self._changed:
            self._slices[bucket.layers] -= 1
            self._changed.notify_all()

    def failed(self, error: GradcompError) -> None:
        with self._changed:
            self._error = error
            self._changed.notify_all()
