"""Interprets Horovod's ``init(comm=...)``, which names the processes that form the job."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from gradcomp.core.errors import ConfigError
from gradcomp.job.network import Ranks


def ranks_of(comm: Any) -> Ranks | None:
    """Return the ranks that ``comm`` names, or None for all.

    ``comm`` is None, an ascending list of ranks of the world, or a communicator of mpi4py. ConfigError for anything
    else, and for a list that does not ascend: ranks keep their order.
    """
    mpi = sys.modules.get("mpi4py.MPI")  # a caller who has a communicator has imported mpi4py
    if mpi is not None and isinstance(comm, mpi.Comm):
        own, world = comm.Get_group(), mpi.COMM_WORLD.Get_group()
        comm = list(mpi.Group.Translate_ranks(own, list(range(own.Get_size())), world))
    if comm is not None and (isinstance(comm, str) or not isinstance(comm, Iterable)):
        raise ConfigError(
            f"comm must be a list of ranks, a communicator of mpi4py or None, got {type(comm).__name__}"
        )
    ranks = () if comm is None else tuple(comm)
    if any(type(rank) is not int or rank < 0 for rank in ranks):
        raise ConfigError(f"comm must list ranks, whole numbers of at least 0, got {list(ranks)}")
    if list(ranks) != sorted(set(ranks)):
        raise ConfigError(f"comm must list each rank only once, in ascending order, got {list(ranks)}")
    return ranks or None
