"""One place in a program that exchanges gradients: which of them travel together, and the inputs of its ops."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

#: For each variable a tensor, ``tf.IndexedSlices``, or None.
Gradients = list[Any]


class Site:
    """A call of ``exchange``: layers by number, and the groups in which they are submitted.

    ``absent`` lists layers without a gradient, ``sparse`` those with ``tf.IndexedSlices``, in the order of
    the groups.
    """

    def __init__(self, gradients: Gradients, groups: Sequence[Sequence[int]]) -> None:
        self._tensors = {i: _tensors_of(g) for i, g in enumerate(gradients) if g is not None}
        self._counts = {layer: len(tensors) for layer, tensors in self._tensors.items()}
        self.groups = [list(group) for group in groups]
        self.absent = [i for i, gradient in enumerate(gradients) if gradient is None]
        self.sparse = [i for group in self.groups for i in group if self._counts[i] == 2]

    def dense(self, number: int) -> list[int]:
        return [layer for layer in self.groups[number] if self._counts[layer] == 1]

    def inputs(self, number: int) -> tuple[list[Any], list[Any]]:
        """Return the tensors of the group's sparse gradients, and of its dense ones; drops the references to them."""
        rows, dense = (
            [
                tensor
                for layer in self.groups[number]
                if self._counts[layer] == count
                for tensor in self._tensors.pop(layer)
            ]
            for count in (2, 1)
        )
        return rows, dense

    def take(self, number: int, values: Sequence[Any]) -> Iterator[tuple[int, Sequence[Any]]]:
        """Yield the group's layers with the values of their tensors, which are in the order of :meth:`inputs`."""
        row, gradient = 0, 2 * sum(self._counts[layer] == 2 for layer in self.groups[number])
        for layer in self.groups[number]:
            if self._counts[layer] == 2:
                yield layer, values[row : row + 2]
                row += 2
            else:
                yield layer, values[gradient : gradient + 1]
                gradient += 1


def groups_of(gradients: Gradients, shapes: Sequence[Sequence[int]], group_elements: int) -> list[list[int]]:
    """Group layers in the order in which the graph makes their gradients.

    A group ends once it has ``group_elements`` elements. There is at least one group, because one must open
    the exchange.
    """
    place = _places([gradient for gradient in gradients if gradient is not None])
    present = [i for i, gradient in enumerate(gradients) if gradient is not None]
    groups: list[list[int]] = [[]]
    elements = 0
    for layer in sorted(present, key=lambda i: place[id(gradients[i])]):
        if elements >= group_elements:
            groups.append([])
            elements = 0
        groups[-1].append(layer)
        elements += math.prod(shapes[layer])
    return groups


def _places(gradients: Gradients) -> dict[int, tuple[int, int]]:
    """Return by the gradient's id the depth of the graph that makes it, and its op's number there."""
    places = {}
    depth: dict[Any, int] = {}
    graph = tf.compat.v1.get_default_graph()
    while graph is not None and graph not in depth:
        depth[graph] = -len(depth)
        graph = getattr(graph, "outer_graph", None)
    numbers = {graph: {op: i for i, op in enumerate(graph.get_operations())} for graph in depth}
    for gradient in gradients:
        tensor = _tensors_of(gradient)[-1]
        if isinstance(tensor, tf.Tensor) and hasattr(tensor, "graph"):
            made_in = tensor.graph
            places[id(gradient)] = (depth.get(made_in, 0), numbers.get(made_in, {}).get(tensor.op, 0))
        else:
            places[id(gradient)] = (-len(depth), 0)
    return places


def _tensors_of(gradient: Any) -> list[Any]:
    if isinstance(gradient, tf.IndexedSlices):
        return [gradient.indices, gradient.values]
    return [gradient]
