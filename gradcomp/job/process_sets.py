"""Defines process sets: some of the job's ranks, for optimizers and collectives of their own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from gradcomp.core.errors import ConfigError, StateError
from gradcomp.job import runtime

#: The type of ``process_set=``, where None stands for all ranks.
Members = Any


class ProcessSet:
    """Holds some of the job's ranks. Making one is local and costs nothing; its ranks meet when they first use it.

    A rank may be in any number of sets. Members are counted from 0 in ascending order of their ranks. They must all use
    the set in the same way and order. The other ranks must not use it, but may give it to an optimizer and to
    broadcasts of parameters and of an optimizer's state, which then do nothing there. Errors in an exchange name
    members by their number in the set. The name and the meaning are Horovod's, except that nobody need register a set.

    Args:
        ranks: numbers of ranks in the job, in any order.

    Raises:
        ConfigError: if ``ranks`` is anything but distinct whole numbers of at least 0.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        if not isinstance(ranks, Iterable):
            raise ConfigError(f"a process set is a list of ranks of the job, got {type(ranks).__name__}")
        given = list(ranks)
        if not given or any(type(rank) is not int or rank < 0 for rank in given):
            raise ConfigError(f"a process set needs ranks, whole numbers of at least 0, got {given}")
        if len(set(given)) < len(given):
            raise ConfigError(f"a process set must list each rank only once, got {given}")
        self._ranks = tuple(sorted(given))
        self._removed = False

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return the members' ranks in the job, ascending.

        Raises:
            StateError: once :func:`remove_process_set` was called.
        """
        if self._removed:
            raise StateError(f"ProcessSet({list(self._ranks)}) was removed")
        return self._ranks

    def __repr__(self) -> str:
        return f"ProcessSet({list(self._ranks)})"

    def included(self) -> bool:
        """Return whether this process is a member.

        Raises:
            StateError: before ``init``.
        """
        return runtime.rank() in self.ranks

    def rank(self) -> int:
        """Return this process's number within the set, or -1 if it is not a member."""
        return self.ranks.index(runtime.rank()) if self.included() else -1

    def size(self) -> int:
        """Return the number of members."""
        return len(self.ranks)


class _Everyone(ProcessSet):
    """Holds all ranks of the job, whichever job this process is in."""

    def __init__(self) -> None:
        super().__init__([0])

    @property
    def ranks(self) -> tuple[int, ...]:
        return runtime.current().everyone

    def __repr__(self) -> str:
        return "global_process_set"


#: The set of all ranks, which ``process_set=None`` means too.
global_process_set = _Everyone()


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Return a set of these ranks. Local: sets need no registration, at ``init`` or later.

    Raises:
        ConfigError: for ranks that the job does not have.
        StateError: before ``init``.
    """
    found = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    _check_there(found)
    return found


def remove_process_set(process_set: ProcessSet) -> bool:
    """End the use of a set, which raises StateError from now on. Return False for the set of all ranks, which stays.

    Local. The members' connections stay until ``shutdown``; another set of the same ranks uses them.
    """
    if isinstance(process_set, _Everyone):
        return False
    process_set._removed = True
    return True


def _check_there(process_set: ProcessSet) -> None:
    size = runtime.current().size
    if process_set.ranks[-1] >= size:
        raise ConfigError(f"{process_set}: the job has ranks 0 .. {size - 1}")


def members(process_set: Members) -> tuple[int, ...]:
    """Return the ranks of a process set, as :func:`ranks_of`; ConfigError where this process is not one of them."""
    ranks = ranks_of(process_set)
    if runtime.rank() not in ranks:
        raise ConfigError(f"rank {runtime.rank()} is not a member of {ProcessSet(ranks)}")
    return ranks


def ranks_of(process_set: Members) -> tuple[int, ...]:
    """Return the ranks, in the job, of a process set or of a group that the user has made with the engine.

    ConfigError for anything else, and for ranks that the job does not have.
    """
    state = runtime.current()
    if process_set is None:
        return state.everyone
    if isinstance(process_set, ProcessSet):
        _check_there(process_set)
        return process_set.ranks
    if (found := state.network.members(process_set)) is not None:
        return found
    raise ConfigError(
        "process_set must be a ProcessSet, a group of torch.distributed or a DeviceMesh of one dimension, "
        f"got {type(process_set).__name__}"
    )


def root_of(root_rank: Any, process_set: Members) -> tuple[int, str | None]:
    """Return the root's number among the members, and an error text if it is not among them."""
    ranks = members(process_set)
    if isinstance(root_rank, int) and root_rank in ranks:
        return ranks.index(root_rank), None
    there = f"a member of {ProcessSet(ranks)}" if process_set is not None else f"in 0 .. {len(ranks) - 1}"
    return 0, f"root_rank must be {there}, got {root_rank!r}"
