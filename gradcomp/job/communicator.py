"""``init(comm=...)``: Horovod's ways to say which of the started processes are the job."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from gradcomp.core.errors import ConfigError
from gradcomp.job.network import Ranks


def ranks_of(comm: Any) -> Ranks | None:
    """The ranks that ``comm`` names: None, a list of ranks of the world, or a communicator of mpi4py; None: all.

    ConfigError for anything else, and for a list that does not ascend: ranks keep their order.
    """
    mpi = sys.modules.get("mpi4py.MPI")  # whoever has a communicator has imported it
    if mpi is not None and isinstance(comm, mpi.Comm):
        own, world = comm.Get_group(), mpi.COMM_WORLD.Get_group()
        comm = list(mpi.Group.Translate_ranks(own, list(range(own.Get_size())), world))
    if comm is not None and (isinstance(comm, str) or not isinstance(comm, Iterable)):
        raise ConfigError(
            f"comm must be a list of ranks, a communicator of mpi4py or None, got {type(comm).__name__}"
        )
    ranks = () if comm is None else tuple(comm)
    if any(type(rank) is not int or rank < 0 for rank in ranks):
        raise ConfigError(f"comm must have ranks, which are 0 or more, got {list(ranks)}")
    if list(ranks) != sorted(set(ranks)):
        raise ConfigError(f"comm must have every rank once, in ascending order, got {list(ranks)}")
    return ranks or None
