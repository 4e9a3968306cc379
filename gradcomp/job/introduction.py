"""Lets the ranks exchange hosts, settings and versions once they have met, and checks that these fit together."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Sequence
from typing import Any

from gradcomp.core.config import unknown_variables
from gradcomp.core.errors import ConfigError, WireFormatError
from gradcomp.core.text import printable
from gradcomp.core.topology import Topology
from gradcomp.job.launch import placed
from gradcomp.job.network import Ranks
from gradcomp.job.signing import agree_on_seal
from gradcomp.job.state import Runtime
from gradcomp.reduce.header import PROTOCOL
from gradcomp.version import __version__

logger = logging.getLogger("gradcomp")


def set_of(process_set: Any, size: int) -> Ranks:
    """Return the ranks of a process set that :func:`init` was given; ConfigError if it is none."""
    given = getattr(process_set, "ranks", process_set)
    ranks = list(given) if isinstance(given, Iterable) else []
    if not ranks or len(set(ranks)) < len(ranks) or not all(type(r) is int and 0 <= r < size for r in ranks):
        raise ConfigError(f"process_sets: {given!r} is not a list of some of the ranks 0 .. {size - 1}")
    return tuple(sorted(ranks))


def introduce(runtime: Runtime, process_sets: Sequence[Ranks]) -> None:
    """Exchange hosts, transports and versions with the other ranks, and derive places and topology from the hosts.

    Then agree on a key for signatures, and make the process sets that all ranks must make together. Collective.
    ConfigError on every rank if versions, transports or process sets differ.
    """
    version = f"gradcomp {__version__}, wire protocol {PROTOCOL}"
    unknown = unknown_variables(os.environ)
    own = json.dumps([runtime.launch.host, runtime.config.transport, str(process_sets), version, *unknown])
    told = [_introduction(part) for part in runtime.group(runtime.everyone).allgather_bytes(own.encode())]
    if runtime.rank == 0:
        _warn_of_variables([warnings for *_, warnings in told])
    if others := [rank for rank, (_, _, _, theirs, _) in enumerate(told) if theirs != told[0][3]]:
        raise ConfigError(
            f"rank 0 runs {told[0][3]}, rank {others[0]} {told[others[0]][3]}: all ranks need the same version"
        )
    transports = [transport for _, transport, *_ in told]
    if others := [rank for rank, name in enumerate(transports) if name != transports[0]]:
        raise ConfigError(
            f"rank 0 has transport={transports[0]}, rank {others[0]} has {transports[others[0]]}: "
            "all ranks need the same one"
        )
    if others := [rank for rank, (_, _, sets, *_) in enumerate(told) if sets != told[0][2]]:
        raise ConfigError(
            f"rank 0 has process_sets={told[0][2]}, rank {others[0]} has {told[others[0]][2]}: all ranks "
            "must be given all of them"
        )
    hosts = [host for host, *_ in told]
    runtime.hosts = tuple(hosts)
    runtime.topology = Topology.of(hosts)
    runtime.launch = placed(runtime.launch, runtime.rank, hosts)
    if runtime.network.exposed:
        one_host = len(runtime.topology.leaders) == 1
        runtime.seal = agree_on_seal(runtime.group(runtime.everyone), one_host, runtime.launch.secret)
    if process_sets and runtime.config.transport == "horovod":
        from gradcomp.transport.horovod import process_set  # Horovod is imported only where it is used

        for ranks in process_sets:
            process_set([runtime.network.ranks[rank] for rank in ranks])


def _warn_of_variables(by_rank: Sequence[Sequence[str]]) -> None:
    """Log each rank's warnings, those of several ranks once, and name the ranks unless it is all of them."""
    for text in sorted({text for texts in by_rank for text in texts}):
        ranks = [rank for rank, texts in enumerate(by_rank) if text in texts]
        where = "" if len(ranks) == len(by_rank) else f" (on rank {', '.join(map(str, ranks))})"
        logger.warning("%s%s", text, where)


def _introduction(part: bytes) -> tuple[str, str, str, str, list[str]]:
    try:
        introduction = json.loads(part)
    except ValueError as error:
        raise WireFormatError(f"a rank introduced itself with {part!r:.80}") from error
    if not isinstance(introduction, list) or len(introduction) < 4:
        raise ConfigError(
            f"a rank introduced itself with {part!r:.80}: it runs another version of gradcomp; all ranks need the same"
        )
    host, transport, process_sets, version, *warnings = (printable(str(item)) for item in introduction)
    return host, transport, process_sets, version, warnings
