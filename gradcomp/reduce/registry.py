"""Reductions by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gradcomp.core.scheme import Scheme, parse
from gradcomp.core.topology import Topology
from gradcomp.reduce.all_to_all import AllToAllBroadcast
from gradcomp.reduce.base import HOST_MEMORY, Memory, Part, Reduction
from gradcomp.reduce.gather import GatherAndSum
from gradcomp.reduce.hierarchical import Hierarchical
from gradcomp.reduce.parameter_server import ParameterServer
from gradcomp.reduce.ring import Ring
from gradcomp.reduce.sra import ScatterReduceAllgather
from gradcomp.reduce.tree import Tree

_FLAT: dict[str, Callable[..., Reduction]] = {
    "sra": ScatterReduceAllgather,
    "ring": Ring,
    "tree": Tree,
    "all_to_all": AllToAllBroadcast,
    "gather": GatherAndSum,
}


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
    if scheme.name in _FLAT:
        return _FLAT[scheme.name](parts, layers, rank, topology.world, memory=memory)
    if scheme.name == "parameter_server":
        # Alone, a rank serves itself, whatever the setting of the jobs that have more.
        servers = scheme.servers if topology.world > 1 else 1
        dedicated = scheme.serving(topology.world) > 0
        return ParameterServer(
            parts, layers, rank, topology.world, servers, dedicated=dedicated, memory=memory
        )
    assert scheme.name == "hierarchical", f"{scheme} is to be resolved by the caller"
    return Hierarchical(parts, layers, rank, topology, turn, memory)
