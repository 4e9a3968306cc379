"""Headers are written into every message that leaves, and checked in every message that arrives.

Reductions and gathers yield their rounds as :class:`Move` and never see a header.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

from gradcomp.core.errors import WireFormatError
from gradcomp.kernels.pending import Pending
from gradcomp.reduce.base import Binding, Move, Rounds, Waits
from gradcomp.reduce.header import BucketFlags, Bytes, HeaderId, check_covers
from gradcomp.transport.base import Operation

T = TypeVar("T")

#: Once headers are written, a program waits for operations that are issued together, or for a call of a device.
Framed = list[Operation] | Pending


def framed(
    program: Waits[T], header_id: HeaderId, flags: BucketFlags, binding: Binding, first: int = 0
) -> Generator[Framed, None, T]:
    """Run a program's rounds with headers; the first round has the number ``first``.

    Before a round, the flags that this rank knows are written into all messages that it sends. After the round, the
    messages that arrived are checked and their flags added. Flags are never cleared, so a flag may arrive twice.
    """
    frames = _Frames(header_id, flags, first)
    while True:
        try:
            step = next(program)
        except StopIteration as end:
            returned: T = end.value
            return returned
        if isinstance(step, Move):
            with binding.span("compress"):
                frames.close(step)
            yield [step.operation]
            frames.open(step)
        else:
            yield step


def unless_declined(program: Rounds, flags: BucketFlags) -> Rounds:
    """Run the program, and stop after a round in which some rank has declined."""
    while not flags.declined:
        try:
            step = next(program)
        except StopIteration as end:
            found: list[Bytes] = end.value
            return found
        yield step
    return []


def alone(move: Move) -> Rounds:
    """Return a program that consists of this round."""
    yield move
    return []


class _Frames:
    """Writes and checks the headers of one program in one step."""

    def __init__(self, header_id: HeaderId, flags: BucketFlags, first: int) -> None:
        self._header_id, self._flags, self._round = header_id, flags, first
        self._sent: Bytes | None = None
        self._of_ranks: int | None = None  # the last state byte of the results, which is about the ranks

    def close(self, move: Move) -> None:
        """Write the headers of a round's messages, whose payloads are written already."""
        header, states = None, self._flags.states
        for message in move.sends:
            if message.header is not header:
                header = message.header
                header.identify(self._header_id, self._round)
            payload = header.write(message.buffer, message.chunk, self._flags)
            if move.common or move.whole:
                self._flags.results.add(payload)
        if move.sends and self._sent is None:
            self._sent = states.copy()
        if move.sends and move.whole:
            self._of_ranks = int(states[-1])

    def open(self, move: Move) -> None:
        """Check the headers of the messages that arrived in a round, and count the round."""
        header = None
        for sender, message in move.arrivals:
            if message.header is not header:
                header = message.header
                header.identify(self._header_id, self._round if move.framed_in is None else move.framed_in)
            states, fingerprint, payload = header.read(message.buffer, message.chunk, sender)
            if move.whole:
                self._check_whole(states, sender)
            if move.common or move.whole:
                self._flags.results.add(payload)
            self._flags.states |= states
            self._flags.compare(fingerprint)
        self._round += 1

    def _check_whole(self, states: Bytes, sender: int) -> None:
        """Raise WireFormatError for a result that lacks this rank's flags or contradicts another result."""
        if self._sent is not None:
            check_covers(states, self._sent, f"rank {sender}")
        if self._of_ranks is None:
            self._of_ranks = int(states[-1])
        elif self._of_ranks != states[-1]:
            raise WireFormatError(
                f"the results of rank {sender} and of another rank differ in their last state byte: they disagree on "
                "which ranks are ready for the next plan, or on what became of the last means"
            )
