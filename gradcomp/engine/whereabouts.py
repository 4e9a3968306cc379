"""Where the other ranks are, so that a rank that waits can say for whom, and why.

Keys of the control channel, all of the job: ``where/<rank>``, what a rank waits for, empty while it does not wait;
``left/<rank>``, set once it has called ``shutdown()``. Below the prefix of an exchanger, or of the user's collectives:
``left``, the rank that left first and the place that it had reached.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from gradcomp.core.errors import TransportError
from gradcomp.core.text import printable
from gradcomp.transport.control import ControlChannel, StoreSilentError, numbers_of

logger = logging.getLogger("gradcomp")

#: Where a rank is that has called ``shutdown()``: it takes part in nothing any more.
LEFT = "shutdown()"
#: A rank that waits for one that has left gives up after this time: its last message may still be on the way.
LEFT_GRACE_SECONDS = 2.0


@dataclass(frozen=True)
class Roster:
    """The members of a communicator, in its order: their ranks in the job and their hosts, if these are known."""

    ranks: tuple[int, ...]
    hosts: tuple[str, ...] = ()

    @staticmethod
    def of_size(size: int) -> Roster:
        """Ranks 0 .. size - 1 of which nothing else is known."""
        return Roster(tuple(range(size)))

    def name(self, member: int) -> str:
        """A member in words."""
        rank = self.ranks[member]
        return f"rank {rank} (host {self.hosts[member]})" if self.hosts else f"rank {rank}"

    def names(self, members: Sequence[int]) -> str:
        """Members in words."""
        return ", ".join(self.name(member) for member in members)


class Whereabouts:
    """What this rank says of itself, and what the others have said. A store that fails makes it know nothing."""

    def __init__(self, control: ControlChannel, roster: Roster, member: int) -> None:
        self._control = control
        self._roster = roster
        self._own = roster.ranks[member]
        self._said = ""
        self._lost = False

    def say(self, where: str) -> None:
        """Publish what this rank waits for; nothing is published twice."""
        if where != self._said and self._publish(f"where/{self._own}", where):
            self._said = where

    def leave(self) -> None:
        """Publish that this rank has called ``shutdown()``."""
        self._publish(f"left/{self._own}", LEFT)

    def of(self, member: int) -> str:
        """``LEFT``, or what a member has said last; empty if nothing."""
        rank = self._roster.ranks[member]
        return LEFT if self._lookup(f"left/{rank}") else self._lookup(f"where/{rank}")

    def _publish(self, key: str, value: str) -> bool:
        if self._lost:
            return False
        try:
            self._control.publish(key, value.encode())
        except TransportError as error:
            self._lost = not isinstance(error, StoreSilentError)
            return False
        return True

    def _lookup(self, key: str) -> str:
        if self._lost:
            return ""
        try:
            found = self._control.lookup(key)
        except TransportError as error:
            self._lost = not isinstance(error, StoreSilentError)
            return ""
        return "" if found is None else printable(found)


def publish_departure(control: ControlChannel, prefix: str, member: int, reached: Sequence[int]) -> None:
    """Say that ``member`` left at ``reached``; of several departures the earliest place counts."""
    try:
        known = departure(control.lookup(f"{prefix}/left"), len(reached))
        if known is None or tuple(reached) < known[1]:
            control.publish(f"{prefix}/left", json.dumps([member, *reached]).encode())
    except TransportError:
        logger.debug("the departure could not be published", exc_info=True)


def departure(value: bytes | None, length: int) -> tuple[int, tuple[int, ...]] | None:
    """The member that left first, and the place of ``length`` numbers that it had reached; None while all are there."""
    found = numbers_of(value, 1 + length)
    return None if found is None else (found[0], tuple(found[1:]))
