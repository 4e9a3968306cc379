"""Reductions are registered under the names by which settings choose them."""

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
    """Return a decorator that registers a reduction under ``name``; ConfigError if the name is taken."""

    def add(reduction: Class) -> Class:
        schemes.register(name)
        _classes[name] = reduction
        return reduction

    return add


def of(scheme: Scheme) -> type[Reduction]:
    """Return the class of a reduction; ``auto`` has none."""
    return _classes[scheme.name]


def with_partial_sums() -> list[str]:
    """Return the names of the reductions whose messages hold codes of sums over some of the ranks."""
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
    """Make a reduction for one exchange bucket of ``layers`` layers, on one of the topology's ranks.

    ``auto`` is not accepted: :func:`gradcomp.reduce.costs.cheapest` finds the reduction that it stands for.

    Args:
        scheme: The reduction, as a name with options or parsed.
        parts: The groups of the bucket, with their codecs.
        layers: The number of layers in the bucket's header.
        rank: This rank.
        topology: The ranks, and the hosts that they are on.
        turn: The number of the bucket; ranks that can do the same work take turns, bucket by bucket.
        memory: The memory for messages, if the gradients are not on the host.

    Raises:
        ConfigError: The name is unknown, there are more servers than ranks, or the reduction cannot add a codec.
    """
    if isinstance(scheme, str):
        scheme = parse(scheme)
    reduction: Callable[..., Reduction] = of(scheme)
    return reduction(parts, layers, rank, memory=memory, **of(scheme).arguments(scheme, topology, turn))
