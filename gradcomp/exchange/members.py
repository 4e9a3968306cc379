"""A watch knows the members of a communicator and where they are: late, dead, gone or failed."""

from __future__ import annotations

import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from gradcomp.core.config import Config
from gradcomp.core.errors import GradcompError, TransportError
from gradcomp.core.strings import printable
from gradcomp.exchange.watchdog import ABORT, LEFT, LEFT_GRACE_SECONDS, NOWHERE, Position, Wait, Watchdog
from gradcomp.transport.control import numbers_of

logger = logging.getLogger("gradcomp")

#: The most ranks that a message names. In a large job nearly all ranks may be late, and each logs its own message.
_MOST_NAMED = 16


@dataclass(frozen=True)
class Roster:
    """Lists the members of a communicator, in its order: their ranks in the job, and their hosts if known."""

    ranks: tuple[int, ...]
    hosts: tuple[str, ...] = ()

    @staticmethod
    def of_size(size: int) -> Roster:
        """Return ranks 0 .. size - 1, of which nothing else is known."""
        return Roster(tuple(range(size)))

    def name(self, member: int) -> str:
        """Return the words for a member."""
        rank = self.ranks[member]
        return f"rank {rank} (host {self.hosts[member]})" if self.hosts else f"rank {rank}"

    def names(self, members: Sequence[int]) -> str:
        """Return the words for several members; of many, those of the first ones and how many more there are."""
        more = len(members) - _MOST_NAMED
        named = ", ".join(self.name(member) for member in members[:_MOST_NAMED])
        return f"{named} and {more} more" if more > 0 else named


class Watch(Wait, ABC):
    """Watches this rank's waits for the other members of one communicator.

    ``aborts`` are keys that end a wait, in addition to the scope's own key.
    """

    #: The words of an error if no rank is to blame, and those before the message of another rank.
    nobody, aborted = "", ""

    def __init__(
        self,
        watchdog: Watchdog,
        config: Config,
        scope: str,
        member: int,
        roster: Roster,
        aborts: Sequence[str] = (),
    ) -> None:
        super().__init__(watchdog, config)
        self.roster = roster
        self.scope = scope
        self.member = member
        self._abort = f"{scope}/{ABORT}"
        self._aborts = (self._abort, *aborts)

    @property
    def own_rank(self) -> str:
        """Return the words for this rank, by its number in the job."""
        return f"rank {self.roster.ranks[self.member]}"

    @abstractmethod
    def ended(self, waited: float, why: str) -> str:
        """Return the message of a wait that is given up."""

    @abstractmethod
    def absence(self, member: int, at: Position, waits_for: str) -> str:
        """Return a text that says how far a late member has come, or what it waits in."""

    def look(self, waited: float) -> GradcompError | None:
        """Return the error if a member has failed, or has left before what this rank waits for."""
        control = self.watchdog.control
        for key in self._aborts:
            if (abort := control.lookup(key)) is not None:
                self.told = True
                return TransportError(f"{self.aborted}{printable(abort)}")
        if waited > LEFT_GRACE_SECONDS:
            left = first_departure(self.watchdog, self.scope)
            if left is not None and 0 <= left[0] < len(self.roster.ranks) and left[0] != self.member:
                member, reached = left
                if order(reached) < order(self.position):
                    return TransportError(self.ended(waited, self.absence(member, reached, LEFT)))
        return None

    def overdue(self, waited: float) -> str:
        return self.ended(waited, self.culprits())

    def culprits(self) -> str:
        """Ask all members for their positions; return which are dead or late. This takes up to two seconds.

        If another rank has found the cause in the meantime, and may have ended since, its message is returned.
        """
        control = self.watchdog.control
        position = self.position
        try:
            others = [rank for member, rank in enumerate(self.roster.ranks) if member != self.member]
            answers = self.watchdog.ask(others, lambda: control.lookup(self._abort) is not None)
            abort = control.lookup(self._abort)
        except TransportError as error:
            return f"the ranks cannot be asked: {error}"
        if abort is not None:
            return f"aborted by {printable(abort)}"
        ranks = self.roster.ranks
        silent = [m for m, rank in enumerate(ranks) if rank not in answers and m != self.member]
        parts = [f"no answer from {self.roster.names(silent)} (dead or stopped)"] if silent else []
        behind = {}
        for member, rank in enumerate(ranks):
            if rank in answers:
                at = answers[rank].positions.get(self.scope, NOWHERE)
                if order(at) < order(position):
                    behind[member] = at
        for member, at in list(behind.items())[:_MOST_NAMED]:
            parts.append(self.absence(member, at, answers[ranks[member]].waits_for))
        if len(behind) > _MOST_NAMED:
            parts.append(f"{len(behind) - _MOST_NAMED} more ranks are late")
        return "; ".join(parts) or self.nobody

    def publish_abort(self, message: str) -> None:
        """Make every member raise; the first message stays."""
        publish_abort(self.watchdog, self._abort, message)

    def depart(self) -> None:
        """Publish that this rank takes no further part; of several departures the earliest counts."""
        publish_departure(self.watchdog, self.scope, self.member, self.position)


def first_departure(watchdog: Watchdog, scope: str) -> tuple[int, Position] | None:
    """Return the member that left the scope first and the position that it had reached; None if none has left."""
    found = numbers_of(watchdog.control.lookup(f"{scope}/left"), 4)
    return None if found is None else (found[0], (found[1], found[2], found[3]))


def publish_departure(watchdog: Watchdog, scope: str, member: int, reached: Position = NOWHERE) -> None:
    """Publish that a member of a scope takes no further part; of several departures the earliest counts."""
    try:
        known = first_departure(watchdog, scope)
        if known is None or reached < known[1]:
            watchdog.control.publish(f"{scope}/left", json.dumps([member, *reached]).encode())
    except TransportError:
        logger.debug("the departure could not be published", exc_info=True)


def publish_abort(watchdog: Watchdog, key: str, message: str) -> None:
    """Publish a message where every rank looks; the first one stays."""
    try:
        if watchdog.control.lookup(key) is None:
            watchdog.control.publish(key, printable(message).encode())
    except TransportError:
        logger.debug("the abort could not be published", exc_info=True)


class StepWatch(Watch):
    """Words the messages about an exchanger's steps."""

    nobody, aborted = "all ranks answer and are at the same place", "aborted: "

    def stalled(self, waited: float) -> str:
        return f"{self.own_rank} has waited {waited:.0f} s at {self.where}; {self.culprits()}"

    def ended(self, waited: float, why: str) -> str:
        return f"{self.own_rank} waited {waited:.1f} s at {self.where}; {why}"

    def absence(self, member: int, at: Position, waits_for: str) -> str:
        name = self.roster.name(member)
        if waits_for == LEFT:
            return (
                f"{name} has left the training loop after {at[0]} steps: it is in {LEFT}; all ranks must take the same "
                "number of steps"
            )
        if waits_for and at[1] < 0:
            return (
                f"{name} is not in the training loop: after {at[0]} steps it waits in {waits_for}; all ranks must take "
                "the same number of steps"
            )
        return f"{name} has only reached {place(at)}"


def place(position: Position) -> str:
    """Return the words for a position."""
    step, bucket, round_number = position
    if bucket < 0:
        return f"step {step}, none of whose gradients has come"
    if round_number < 0:
        return f"step {step}, bucket {bucket}, whose gradients have not all come"
    return f"step {step}, bucket {bucket}, round {round_number}"


def order(position: Position) -> Position:
    """Return a key that sorts positions as ranks pass them: bucket b is in its round r at tick b + r."""
    step, bucket, round_number = position
    return (step, bucket + round_number, round_number) if min(bucket, round_number) >= 0 else position
