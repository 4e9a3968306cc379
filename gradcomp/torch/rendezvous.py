"""How the ranks of a job meet: they agree on an address, share a key-value store and form the default group.

The store outlives the group, so that ``init`` after ``shutdown`` need not agree on an address again.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from gradcomp.core.errors import ConfigError, TransportError
from gradcomp.torch.jobstore import Deadline, first_line, interface_address, open_store
from gradcomp.torch.launch import Launch

_FAREWELL_SECONDS = 10.0

_store: Any = None
_meetings = 0


def connect(launch: Launch, timeout_seconds: float, fingerprint: str = "") -> Launch:
    """Form torch.distributed's default group (Gloo) unless there is one; the launch with its place on the hosts.

    Collective; ``timeout_seconds`` bounds the whole meeting and becomes the group's timeout. A world of one needs no
    group and gets none. ``fingerprint``: what all ranks must have alike, in words ("transport=mpi"). Wire: a few small
    values per rank, over TCP to rank 0's store.

    Raises ConfigError if nothing says where to meet, if the interface that the environment asks for is not there, and,
    on every rank, if the fingerprints differ; TransportError, which names the missing ranks and the address, if not
    all ranks are there in time.
    """
    global _store, _meetings
    if launch.size == 1 or dist.is_initialized():
        return launch
    if launch.interface is not None:
        interface_address(launch)
        if not os.environ.get(
            "GLOO_SOCKET_IFNAME"
        ):  # where Gloo looks, for this group and for all later ones
            os.environ["GLOO_SOCKET_IFNAME"] = launch.interface
    deadline = Deadline(launch, timeout_seconds)
    _meetings += 1
    with ExitStack() as once_met:
        store, _store = _store, None  # kept only if the meeting succeeds
        if store is None:
            store = open_store(launch, deadline, once_met)
        meeting = PrefixStore(f"gradcomp/meeting-{_meetings}", store)
        hosts = _check_in(meeting, launch.rank, range(launch.size), deadline, fingerprint)
    try:
        dist.init_process_group(
            "gloo",
            store=meeting,
            rank=launch.rank,
            world_size=launch.size,
            timeout=timedelta(seconds=timeout_seconds),
        )
    except RuntimeError as error:
        raise deadline.error(
            f"the ranks met, but Gloo could not connect them: {first_line(error)}"
        ) from error
    _store = store
    return placed(launch, launch.rank, hosts)


def locate(launch: Launch, ranks: Sequence[int], timeout_seconds: float) -> Launch:
    """The launch with its place among ``ranks`` of an existing default group, by host names in the group's store.

    Collective over ``ranks``. Raises TransportError, which names the ranks that did not call it in time.
    """
    global _meetings
    if launch.placed or len(ranks) == 1:
        return launch
    _meetings += 1
    prefix = f"gradcomp/locate-{_meetings}/{ranks[0]}-{len(ranks)}"
    store = PrefixStore(prefix, dist.distributed_c10d._get_default_store())
    hosts = _check_in(store, launch.rank, ranks, Deadline(launch, timeout_seconds))
    return placed(launch, list(ranks).index(launch.rank), hosts)


def _check_in(
    store: Any, rank: int, ranks: Sequence[int], deadline: Deadline, fingerprint: str = ""
) -> list[str]:
    """Wait until every rank has been here with the same fingerprint; their host names."""
    keys = [f"rank/{r}" for r in ranks]
    try:
        if store.add(f"claim/{rank}", 1) != 1:
            raise deadline.error(f"another process says that it is rank {rank}")
        store.set(f"rank/{rank}", f"{socket.gethostname()}\n{fingerprint}")
        try:
            store.wait(keys, deadline.left())
        except dist.DistStoreError:
            missing = [str(r) for r, key in zip(ranks, keys, strict=True) if not store.check([key])]
            raise deadline.error(
                f"rank {', '.join(missing)} of {len(ranks)} did not arrive in time"
            ) from None
        records = [bytes(record).decode(errors="replace") for record in store.multi_get(keys)]
    except TransportError:
        raise
    except RuntimeError as error:
        raise deadline.error(f"the store is gone: {first_line(error)}") from error
    said = [record.partition("\n") for record in records]
    if len({value for _, _, value in said}) > 1:
        _see_off(store, rank, ranks)
        raise _disagreement(ranks, [value for _, _, value in said])
    return [host for host, _, _ in said]


def _see_off(store: Any, rank: int, ranks: Sequence[int]) -> None:
    """Every rank has read the same records and will raise the same error, unless the store's host leaves before."""
    with suppress(RuntimeError):
        store.set(f"read/{rank}", "")
        if rank == ranks[0]:
            store.wait([f"read/{r}" for r in ranks], timedelta(seconds=_FAREWELL_SECONDS))


def _disagreement(ranks: Sequence[int], fingerprints: Sequence[str]) -> ConfigError:
    holders: dict[str, list[str]] = {}
    for rank, value in zip(ranks, fingerprints, strict=True):
        holders.setdefault(value or "nothing said", []).append(str(rank))
    said = "; ".join(f"{value} on rank {', '.join(them)}" for value, them in holders.items())
    return ConfigError(f"the ranks were started with different settings: {said}")


def placed(launch: Launch, index: int, hosts: Sequence[str]) -> Launch:
    """Local and cross values by host name, as Horovod counts: cross is among the ranks with the same local rank."""
    if launch.placed:
        return launch
    before: dict[str, int] = {}
    places = []
    for host in hosts:
        places.append((host, before.get(host, 0)))
        before[host] = before.get(host, 0) + 1
    host, local_rank = places[index]
    peers = [h for h, local in places if local == local_rank]
    return replace(
        launch,
        local_rank=local_rank,
        local_size=before[host],
        cross_rank=peers.index(host),
        cross_size=len(peers),
        placed=True,
    )
