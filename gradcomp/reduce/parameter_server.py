"""Parameter servers, both ways compressed (Markov 2024, section 2.2.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
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

    Scatter-reduce-allgather is the case in which all ranks serve, and this is its code: the mean is the same, byte for
    byte. Servers train as well, unless they are ``dedicated``: then they have nothing to add, send
    nothing in the first round, and the mean is that of the other N-S ranks without them, byte for byte.

    Rounds: 2. Bytes per rank: d up for a payload of d bytes, without the chunk that a server owns, and from a server
    (N-1) d/S, plus a header per message; from a dedicated server only the latter. Encodes on the longest path: 2.
    State: the second residual of the owned ranges, on servers, for groups with feedback.
    Errors: ConfigError for more servers than ranks; that somebody must be left to train, :class:`Scheme` sees to.
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
        dedicated: bool = False,
        memory: Memory = HOST_MEMORY,
    ) -> None:
        if not 1 <= servers <= world:
            raise ConfigError(
                f"parameter_server:servers={servers} needs 1 to {world} servers among {world} ranks"
            )
        roles = Roles.of(world, servers)
        if dedicated:
            roles = replace(roles, contributions=world - servers, silent=servers)
        super().__init__(parts, layers, rank, world, roles, memory)

    @staticmethod
    def arguments(scheme: Scheme, topology: Topology, turn: int) -> dict[str, Any]:
        """The options of ``scheme``."""
        dedicated = scheme.trainers(topology.world).start > 0
        return {"world": topology.world, "servers": _servers(scheme, topology), "dedicated": dedicated}

    @staticmethod
    def cost(load: Load, topology: Topology, scheme: Scheme) -> Cost:
        """Two rounds, to the servers and back."""
        return served(load, topology, _servers(scheme, topology), scheme.trainers(topology.world).start)


def _servers(scheme: Scheme, topology: Topology) -> int:
    """Alone, a rank serves itself, whatever the setting of the jobs that have more."""
    return scheme.servers if topology.world > 1 else 1
