"""Parameter servers, both ways compressed (thesis, section 2.2.1)."""

from __future__ import annotations

from collections.abc import Sequence

from gradcomp.core.errors import ConfigError
from gradcomp.reduce.base import Part
from gradcomp.reduce.sra import Roles, ScatterReduceAllgather


class ParameterServer(ScatterReduceAllgather):
    """The first S ranks serve: each owns one of S chunks, adds all ranks' codes of it and sends its mean to everyone.

    Scatter-reduce-allgather is the case in which all ranks serve, and this is its code: the mean is the same, byte for
    byte. A server's header of the second round carries all states and the number of ready ranks, for workers meet
    nobody else. Servers train as well.

    Rounds: 2. Bytes per rank: d up for a payload of d bytes, without the chunk that a server owns, and from a server
    (N-1) d/S, plus a header per message. Encodes on the longest path: 2. State: the second residual of the owned
    ranges, on servers, for groups with feedback.
    Errors: ConfigError for more servers than ranks.
    Source: thesis, section 2.2.1. Differs: what comes back is the mean gradient, not the model.
    """

    def __init__(self, parts: Sequence[Part], layers: int, rank: int, world: int, servers: int = 1) -> None:
        if not 1 <= servers <= world:
            raise ConfigError(
                f"parameter_server:servers={servers} needs 1 to {world} servers among {world} ranks"
            )
        super().__init__(parts, layers, rank, world, Roles.of(world, servers))
