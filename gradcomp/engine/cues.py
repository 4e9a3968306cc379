"""How ranks that only serve learn what those who train are about to do."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from gradcomp.core.errors import StateError, WireFormatError
from gradcomp.core.role import Role
from gradcomp.reduce.header import MAGIC, PROTOCOL
from gradcomp.transport.base import Handle, Transport

#: A step begins; there will be none until the server serves again.
STEP, DONE = 1, 2

_WORD = np.dtype([("magic", "<u2"), ("protocol", "u1"), ("cue", "u1"), ("step", "<u4")])


class Cues:
    """The first trainer's word to the ranks that only serve: 8 bytes to each, in order with all collectives.

    A server issues nothing that a trainer may never join: it listens, and does what it is told. The other trainers
    send nothing, and wait for nobody. Where all ranks train there are no messages.
    """

    def __init__(self, transport: Transport, role: Role) -> None:
        self._transport, self._role = transport, role
        self._word = np.zeros(1, dtype=_WORD)
        #: What a trainer gave, or a server heard, last; 0: nothing, or a step that the server has opened since.
        self._last = DONE if role.all_train else 0

    def begin_step(self, step: int) -> Handle | None:
        """A step begins on this rank: the message that goes with it. StateError on a server that was not told to."""
        if self._role.trains:
            return self._give(STEP, step)
        if self._last != STEP:
            raise StateError("this rank only serves: it calls opt.serve(), and has no gradients of its own")
        self._last = 0
        return None

    def dismiss(self, step: int) -> Handle | None:
        """On every trainer: there will be no further step for now."""
        if not self._role.trains:
            raise StateError("this rank only serves: those who train say when they are done")
        return self._give(DONE, step)

    def listen(self) -> Handle:
        """On every server; then :meth:`heard` says what came."""
        assert not self._role.trains, "only servers listen"
        return self._transport.exchange([], [(self._role.first, self._word.view(np.uint8))])

    def heard(self, step: int) -> bool:
        """Whether a step begins, else there will be none; WireFormatError unless it is a cue to this step."""
        magic, protocol, cue, told = self._word[0].tolist()
        if (magic, protocol, told) != (MAGIC, PROTOCOL, step & 0xFFFFFFFF) or cue not in (STEP, DONE):
            raise WireFormatError(
                f"rank {self._role.first} sent {bytes(self._word).hex(' ')} as the cue to step {step}"
            )
        self._last = int(cue)
        return bool(cue == STEP)

    def part(self, step: int, came: Callable[[Handle, str], bool]) -> bool:
        """The program ends: trainers dismiss servers, which listen. False on a server that hears of a further step.

        ``came``: waits for a message, says for whom if it takes long, and returns whether it came.
        """
        if self._last == DONE:
            return True
        if not self._role.trains:
            return not (came(self.listen(), "the ranks that train to end") and self.heard(step))
        if (handle := self._give(DONE, step)) is not None:
            came(handle, "the ranks that serve to hear of the end")
        return True

    def _give(self, cue: int, step: int) -> Handle | None:
        """On every trainer; one at a time."""
        if self._role.all_train:
            return None
        self._last = cue
        self._word[0] = (MAGIC, PROTOCOL, cue, step & 0xFFFFFFFF)
        servers = range(self._role.first if self._role.leads else 0)
        return self._transport.exchange([(server, self._word.view(np.uint8)) for server in servers], [])
