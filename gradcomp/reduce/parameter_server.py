"""Parameter servers receive and send compressed gradients (Markov 2024, section 2.2.1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gradcomp.core.errors import ConfigError
from gradcomp.core.scheme import Scheme
from gradcomp.core.topology import Topology
from gradcomp.reduce.base import HOST_MEMORY, Memory, Part
from gradcomp.reduce.halves import Roles
from gradcomp.reduce.model import Cost, Load
from gradcomp.reduce.registry import register
from gradcomp.reduce.sra import ScatterReduceAllgather, served


@register("parameter_server")
class ParameterServer(ScatterReduceAllgather):
    """The first S ranks serve: each owns one of S chunks, adds all ranks' codes of it and sends its mean to everyone.

    Servers train as well. If all ranks serve, this is scatter-reduce-allgather. For any S the mean has the same bytes
    as there. A value is encoded twice.

    Wire: two rounds. A rank sends its payload of d bytes to the servers, without the chunk that it owns itself. A
    server sends (N-1) d/S bytes back. Each message has a header.
    State: for groups with feedback, a residual per layer and, on servers, the server-side error of the owned ranges.
    Errors: ConfigError for more servers than ranks, or fewer than one.
    Source: Markov 2024, section 2.2.1. Differs: what comes back is the mean gradient, not the model.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        layers: int,
        rank: int,
        world: int,
        servers: int = 1,
        *,
        memory: Memory = HOST_MEMORY,
    ) -> None:
        if not 1 <= servers <= world:
            raise ConfigError(
                f"parameter_server:servers={servers} needs 1 to {world} servers among {world} ranks"
            )
        super().__init__(parts, layers, rank, world, Roles.of(world, servers), memory)

    @staticmethod
    def arguments(scheme: Scheme, topology: Topology, turn: int) -> dict[str, Any]:
        return {"world": topology.world, "servers": _servers(scheme, topology)}

    @staticmethod
    def cost(load: Load, topology: Topology, scheme: Scheme) -> Cost:
        return served(load, topology, _servers(scheme, topology))


def _servers(scheme: Scheme, topology: Topology) -> int:
    """Return the number of servers; 1 in a world of one, so that a setting for larger jobs works there too."""
    return scheme.servers if topology.world > 1 else 1
