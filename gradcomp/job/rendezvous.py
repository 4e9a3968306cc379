"""Lets the ranks of a job meet: they agree on an address, share a key-value store and form the default group.

The store outlives the group, so that ``init`` after ``shutdown`` need not agree on an address again.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from gradcomp.core.errors import TransportError
from gradcomp.job.jobstore import Deadline, Meeting, first_line, interface_address, open_store, with_interface
from gradcomp.job.launch import Launch

_met: Meeting | None = None
_meetings = 0


def connect(launch: Launch, timeout_seconds: float) -> Launch:
    """Form torch.distributed's default group (Gloo) unless there is one. Return the launch with a secret learned there.

    Collective; ``timeout_seconds`` bounds the whole rendezvous and becomes the group's timeout. A world of one needs no
    group and gets none. Wire: a few small values per rank, over TCP to rank 0's store.

    Raises ConfigError if nothing says where to meet or if the interface that the environment names does not exist;
    TransportError, which names the missing ranks and the address, if not all ranks arrive in time.
    """
    global _met, _meetings
    if launch.size == 1 or dist.is_initialized():
        return launch
    launch = with_interface(launch)
    if launch.interface is not None:
        interface_address(launch)
        # Gloo reads it for this group and for all later ones.
        if not os.environ.get("GLOO_SOCKET_IFNAME"):
            os.environ["GLOO_SOCKET_IFNAME"] = launch.interface
    deadline = Deadline(launch, timeout_seconds)
    _meetings += 1
    with ExitStack() as once_met:
        met, _met = _met, None  # kept only if the meeting succeeds
        if met is None:
            met = open_store(launch, deadline, once_met)
        meeting = PrefixStore(f"gradcomp/meeting-{_meetings}", met.store)
        _check_in(meeting, launch, deadline)
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
    _met = met
    return replace(launch, secret=launch.secret or met.secret)


def _check_in(store: Any, launch: Launch, deadline: Deadline) -> None:
    """Wait until every rank has arrived."""
    keys = [f"here/{rank}" for rank in range(launch.size)]
    try:
        if store.add(f"claim/{launch.rank}", 1) != 1:
            raise deadline.error(f"another process says that it is rank {launch.rank}")
        store.set(f"here/{launch.rank}", "")
        try:
            store.wait(keys, deadline.left())
        except dist.DistStoreError:
            missing = ", ".join(str(rank) for rank, key in enumerate(keys) if not store.check([key]))
            raise deadline.error(f"rank {missing} of {launch.size} did not arrive in time") from None
    except TransportError:
        raise
    except RuntimeError as error:
        raise deadline.error(f"the store is gone: {first_line(error)}") from error
