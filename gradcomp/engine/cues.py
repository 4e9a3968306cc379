"""How ranks that only serve learn what those who train are about to do."""

from __future__ import annotations

import numpy as np

from gradcomp.core.errors import WireFormatError
from gradcomp.reduce.header import MAGIC, PROTOCOL
from gradcomp.transport.base import Handle, Transport

#: A step begins; there will be none until the server serves again.
STEP, DONE = 1, 2

_WORD = np.dtype([("magic", "<u2"), ("protocol", "u1"), ("cue", "u1"), ("step", "<u4")])


class Cues:
    """The first trainer's word to the ``servers`` ranks before it: 8 bytes to each, in order with all collectives.

    A server issues nothing that a trainer may never join: it listens, and does what it is told. The other trainers
    send nothing, and wait for nobody.
    """

    def __init__(self, transport: Transport, servers: int) -> None:
        self._transport = transport
        self._servers = servers
        self._word = np.zeros(1, dtype=_WORD)
        #: What a trainer gave, or a server heard, last.
        self.last = 0
        #: Whether a server has heard of a step that it has not opened.
        self.step_is_due = False

    def give(self, cue: int, step: int) -> Handle:
        """On every trainer; one at a time."""
        self.last = cue
        self._word[0] = (MAGIC, PROTOCOL, cue, step & 0xFFFFFFFF)
        sends = range(self._servers) if self._transport.rank == self._servers else ()
        return self._transport.exchange([(server, self._word.view(np.uint8)) for server in sends], [])

    def listen(self) -> Handle:
        """On every server; then :meth:`heard` says what came."""
        return self._transport.exchange([], [(self._servers, self._word.view(np.uint8))])

    def heard(self, step: int) -> int:
        """The cue; WireFormatError unless it is one, for this step."""
        magic, protocol, cue, told = self._word[0].tolist()
        if (magic, protocol, told) != (MAGIC, PROTOCOL, step & 0xFFFFFFFF) or cue not in (STEP, DONE):
            raise WireFormatError(
                f"rank {self._servers} sent {bytes(self._word).hex(' ')} as the cue to step {step}"
            )
        self.last, self.step_is_due = int(cue), cue == STEP
        return self.last
