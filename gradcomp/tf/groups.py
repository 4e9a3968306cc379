"""Groups of the gradients of one call of ``exchange``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

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
