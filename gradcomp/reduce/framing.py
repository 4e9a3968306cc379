"""Headers, beneath reductions and gathers: written into every message that leaves, checked in every one that comes."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

from gradcomp.core.errors import WireFormatError
from gradcomp.kernels.pending import Pending
from gradcomp.reduce.base import Binding, Move, Rounds, Waits
from gradcomp.reduce.header import BucketFlags, Bytes, HeaderId, check_covers
from gradcomp.transport.base import Operation

T = TypeVar("T")

#: What is left to wait for: operations that are issued together, or a call of a device.
Framed = list[Operation] | Pending


def framed(
    program: Waits[T], header_id: HeaderId, flags: BucketFlags, binding: Binding, first: int = 0
) -> Generator[Framed, None, T]:
    """Run a program's rounds, the first of which has the number ``first``.

    Before a round, the flags so far are written into all that leaves. After it, what came is checked, and its flags
    are added. A flag that is set stays set, so it does no harm to hear of it twice.
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
    """The program, up to a round in which a rank has declined."""
    while not flags.declined:
        try:
            step = next(program)
        except StopIteration as end:
            found: list[Bytes] = end.value
            return found
        yield step
    return []


def alone(move: Move) -> Rounds:
    """A round, and nothing before or behind it."""
    yield move
    return []


class _Frames:
    """Headers of one program in one step."""

    def __init__(self, header_id: HeaderId, flags: BucketFlags, first: int) -> None:
        self._header_id, self._flags, self._round = header_id, flags, first
        self._sent: Bytes | None = None
        self._of_ranks: int | None = None  # what results say of the ranks themselves

    def close(self, move: Move) -> None:
        """Write headers: the payloads are there."""
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
        """Read headers; the next round begins."""
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
        """What speaks for all ranks speaks for this one, and says what others say."""
        if self._sent is not None:
            check_covers(states, self._sent, f"rank {sender}")
        if self._of_ranks is None:
            self._of_ranks = int(states[-1])
        elif self._of_ranks != states[-1]:
            raise WireFormatError(
                f"rank {sender} and another one disagree on which ranks are ready for the next plan, or on what became "
                "of the last means"
            )
