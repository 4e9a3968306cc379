"""Parameter servers, both ways compressed (Markov 2024, section 2.2.1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gradcomp.core.errors import ConfigError
from gradcomp.core.scheme import Scheme
from gradcomp.core.topology import Topology
from gradcomp.reduce.base import HOST_MEMORY, Memory, Part
from gradcomp.reduce.model import Cost, Load
from gradcomp.reduce.reduce_scatter import Roles
from gradcomp.reduce.registry import register
from gradcomp.reduce.sra import ScatterReduceAllgather, served


@register("parameter_server")
class ParameterServer(ScatterReduceAllgather):
    """The first S ranks serve: each owns one of S chunks, adds all ranks' codes of it and sends its mean to everyone.

    Servers train as well. Scatter-reduce-allgather is the case in which all ranks serve, and this is its code: the mean
    is the same, byte for byte.

    Rounds: 2. Bytes per rank: d up for a payload of d bytes, without the chunk that a server owns, and from a server
    (N-1) d/S, plus a header per message. Encodes on the longest path: 2.
    State: the second residual of the owned ranges, on servers, for groups with feedback.
    Errors: ConfigError for more servers than ranks.
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
        """The options of ``scheme``."""
        return {"world": topology.world, "servers": _servers(scheme, topology)}

    @staticmethod
    def cost(load: Load, topology: Topology, scheme: Scheme) -> Cost:
        """Two rounds, to the servers and back."""
        return served(load, topology, _servers(scheme, topology))


def _servers(scheme: Scheme, topology: Topology) -> int:
    """Alone, a rank serves itself, whatever the setting of the jobs that have more."""
    return scheme.servers if topology.world > 1 else 1
