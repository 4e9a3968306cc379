"""Who is late, who is dead, who has left: stall warnings, deadlines and aborts over the control channel.

Keys, all below the exchanger's prefix: ``question`` (a counter: "where are you?"), ``at/<rank>`` (that rank's answer
and position), ``abort`` (the message with which every rank raises), ``left`` (see :mod:`gradcomp.engine.whereabouts`).
What they hold is checked before it is used.
"""

from __future__ import annotations

import json
import logging
from time import monotonic, sleep

from gradcomp.core.errors import TransportError
from gradcomp.core.text import printable
from gradcomp.engine.whereabouts import LEFT, Roster, Whereabouts, departure, publish_departure
from gradcomp.transport.control import ControlChannel, StoreSilentError, count_of, numbers_of

logger = logging.getLogger("gradcomp")

#: A rank whose process lives answers within this time, whatever its training thread does.
ANSWER_SECONDS = 2.0

#: (step, bucket, round) that a rank waits for. Round -1: the bucket's gradients. Bucket -1: between steps; round is
#: then the number of collectives that it began since the last one.
Position = tuple[int, int, int]


class Watch:
    """One exchanger's view of the control channel. Used by the engine's thread; :meth:`leave` by any."""

    def __init__(
        self, control: ControlChannel, prefix: str, rank: int, size: int, roster: Roster | None = None
    ) -> None:
        self._control = control
        self._prefix = prefix
        self._rank = rank
        self._size = size
        self._roster = roster or Roster.of_size(size)
        self._whereabouts = Whereabouts(control, self._roster, rank)
        self._answered = 0
        self._warned = False
        self._lost = False

    @property
    def own_rank(self) -> str:
        """This rank, by its number in the job."""
        return f"rank {self._roster.ranks[self._rank]}"

    def look(self, position: Position) -> str | None:
        """Answer a question if there is one; return the abort message if the job was aborted.

        A store that does not answer is no reason to stop: the deadline is.
        """
        if self._lost:
            return None
        try:
            return self._look(position)
        except StoreSilentError as error:
            logger.debug("%s", error)
            return None

    def _look(self, position: Position) -> str | None:
        abort = self._lookup("abort")
        if abort is not None:
            return printable(abort)
        question = count_of(self._lookup("question"))
        if question > self._answered:
            self._answered = question
            self._publish(f"at/{self._rank}", json.dumps([question, *position]).encode())
        return None

    def waits(self, where: str) -> None:
        """Say what this rank waits for; empty: for nothing."""
        self._whereabouts.say(where)

    def leave(self, position: Position) -> None:
        """Say that this rank takes part in no further step."""
        publish_departure(self._control, self._prefix, self._rank, position)

    def departed(self, position: Position) -> str | None:
        """Why what this rank waits for at ``position`` never ends: another has left before; None if none has."""
        if self._lost:
            return None
        try:
            left = departure(self._lookup("left"), 3)
        except TransportError:
            return None
        if left is None or not 0 <= left[0] < self._size or left[0] == self._rank:
            return None
        step, bucket, round_number = left[1]
        if _order((step, bucket, round_number)) >= _order(position):
            return None
        return self._departure(left[0], step)

    def _departure(self, rank: int, step: int) -> str:
        return (
            f"{self._roster.name(rank)} has left the training loop after {step} steps: it is in shutdown(); all ranks "
            "must take the same number of steps"
        )

    def waited(
        self, seconds: float, position: Position, where: str, warn_after: float, abort_after: float
    ) -> None:
        """Called while waiting for the wire: warn once, then raise TransportError past the deadline."""
        if seconds < warn_after:
            self._warned = False
            return
        if seconds >= abort_after:
            raise TransportError(
                f"{self.own_rank} waited {seconds:.1f} s at {where}; {self.culprits(position)}"
            )
        if not self._warned:
            self._warned = True
            logger.warning(
                "%s has waited %.0f s at %s; %s",
                self.own_rank,
                seconds,
                where,
                self.culprits(position),
            )

    def culprits(self, position: Position) -> str:
        """Ask all ranks where they are; say which are dead or behind. Takes up to two seconds.

        If another rank has found out meanwhile, and may be gone by now, its words count.
        """
        try:
            answers = self._ask(position)
            abort = self._lookup("abort")
        except TransportError as error:
            return f"the ranks cannot be asked: {error}"
        if abort is not None:
            return f"aborted by {printable(abort)}"
        silent = [r for r in range(self._size) if r not in answers]
        behind = [r for r, at in answers.items() if _order(at) < _order(position)]
        parts = []
        if silent:
            parts.append(f"no answer from {self._roster.names(silent)} (dead or stopped)")
        parts += [self._behind(r, answers[r]) for r in behind]
        return "; ".join(parts) or "all ranks answer and are at the same place"

    def _behind(self, rank: int, at: Position) -> str:
        where = self._whereabouts.of(rank)
        if where == LEFT:
            return self._departure(rank, at[0])
        if where and at[1] < 0:
            return (
                f"{self._roster.name(rank)} is not in the training loop: after {at[0]} steps it waits in {where}; all "
                "ranks must take the same number of steps"
            )
        return f"{self._roster.name(rank)} has only reached {place(at)}"

    def _ask(self, position: Position) -> dict[int, Position]:
        number = max(count_of(self._lookup("question")), self._answered) + 1
        self._answered = number
        self._publish(f"at/{self._rank}", json.dumps([number, *position]).encode())
        self._publish("question", str(number).encode())
        answers: dict[int, Position] = {self._rank: position}
        deadline = monotonic() + ANSWER_SECONDS
        while len(answers) < self._size and monotonic() < deadline:
            sleep(0.05)
            if self._look(position) is not None:  # others may be asking too
                break
            for r in range(self._size):
                if r not in answers:
                    answer = numbers_of(self._lookup(f"at/{r}"), 4)
                    if answer is not None and answer[0] >= number:
                        answers[r] = (answer[1], answer[2], answer[3])
        return answers

    def publish_abort(self, message: str) -> None:
        """Tell every rank to raise; the first message stays."""
        if self._lost:
            return
        try:
            if self._lookup("abort") is None:
                self._publish("abort", printable(message).encode())
        except TransportError:
            logger.debug("the abort could not be published", exc_info=True)

    def _lookup(self, key: str) -> bytes | None:
        try:
            return self._control.lookup(f"{self._prefix}/{key}")
        except StoreSilentError:
            raise
        except TransportError:
            self._lost = True
            raise

    def _publish(self, key: str, value: bytes) -> None:
        try:
            self._control.publish(f"{self._prefix}/{key}", value)
        except StoreSilentError:
            raise
        except TransportError:
            self._lost = True
            raise


def place(position: Position) -> str:
    """A position in words."""
    step, bucket, round_number = position
    if bucket < 0:
        return f"step {step}, none of whose gradients has come"
    if round_number < 0:
        return f"step {step}, bucket {bucket}, whose gradients have not all come"
    return f"step {step}, bucket {bucket}, round {round_number}"


def _order(position: Position) -> Position:
    """Positions in the order in which ranks pass them: bucket b is in its round r at tick b + r."""
    step, bucket, round_number = position
    return (step, bucket + round_number, round_number) if min(bucket, round_number) >= 0 else position
