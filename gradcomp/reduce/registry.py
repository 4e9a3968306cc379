"""Reductions by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from gradcomp.core import scheme as schemes
from gradcomp.core.scheme import Scheme, parse
from gradcomp.core.topology import Topology
from gradcomp.reduce.base import HOST_MEMORY, Memory, Part, Reduction

_classes: dict[str, type[Reduction]] = {}

Class = TypeVar("Class", bound=type[Reduction])


def register(name: str) -> Callable[[Class], Class]:
    """Give a reduction the name by which settings choose it; ConfigError for a name that another one has."""

    def add(reduction: Class) -> Class:
        schemes.register(name)
        _classes[name] = reduction
        return reduction

    return add


def of(scheme: Scheme) -> type[Reduction]:
    """The class of a reduction. ``auto`` is none."""
    return _classes[scheme.name]


def with_partial_sums() -> list[str]:
    """The names of those in which codes stand for sums over some of the ranks."""
    return [name for name, reduction in _classes.items() if reduction.sums_travel]


def make(
    scheme: Scheme | str,
    parts: Sequence[Part],
    layers: int,
    rank: int,
    topology: Topology,
    turn: int = 0,
    memory: Memory = HOST_MEMORY,
) -> Reduction:
    """The reduction of that name for one bucket of ``layers`` layers, on one of the topology's ranks.

    ``turn``: which bucket it is; where there is a choice of ranks, they take turns. ``memory``: that of the gradients'
    device, if it is not the host.

    Raises ConfigError for an unknown name, for more servers than ranks, and for a codec that the reduction cannot add.
    ``auto`` is no reduction: whoever knows the network asks :func:`gradcomp.reduce.costs.cheapest` first.
    """
    if isinstance(scheme, str):
        scheme = parse(scheme)
    reduction: Callable[..., Reduction] = of(scheme)
    return reduction(parts, layers, rank, memory=memory, **of(scheme).arguments(scheme, topology, turn))
