"""An exchange bucket under way runs its program up to the next collective."""

from __future__ import annotations

import enum
from collections.abc import Callable, Generator
from time import perf_counter

from gradcomp.kernels.pending import Pending
from gradcomp.reduce.framing import Framed
from gradcomp.transport.base import Handle, Operation, Transport


class Waiting(enum.Enum):
    """Says what a pipeline needs before it can go on."""

    NOTHING = "no step is open, or the step is done"
    LAYERS = "the next bucket is not complete"
    DEVICE = "a device computes: the next bucket's gradients, or what is to be sent"
    WIRE = "a collective is under way"
    BACKGROUND = "a controller's work is due and not done"


class InFlight:
    """Runs one bucket's program between its collectives.

    The pipeline decides when collectives are issued, since all ranks share their order. What lies between two of
    them can be done at any time: handles are polled, kernels are started and finished. ``round`` is the last one
    that was issued, -1 before the first. ``is_complete`` says that the program has ended. ``completed(bucket,
    begin, end)`` is called for every round.
    """

    def __init__(
        self,
        number: int,
        program: Generator[Framed, None, None],
        completed: Callable[[int, float, float], None],
    ) -> None:
        self.number = number
        self.round = -1
        self.is_complete = False
        self._program = program
        self._completed = completed
        self._handles: list[Handle] | None = None  # of the round that was issued last
        self._call: Pending | None = None
        self._due: list[Operation] | None = None  # the next round, which is not issued yet
        self._issued = 0.0

    def prepare(self) -> Waiting:
        """Go on without waiting or issuing; return NOTHING when a round is due or the bucket is complete."""
        while not self.is_complete and self._due is None:
            if self._handles is not None:
                while self._handles:
                    if not self._handles[0].poll():
                        return Waiting.WIRE
                    del self._handles[0]
                self._handles = None
                self._completed(self.number, self._issued, perf_counter())
            if self._call is not None:
                if not self._call.done():
                    return Waiting.DEVICE
                self._call = None
            try:
                step = next(self._program)
            except StopIteration:
                self.is_complete = True
                continue
            if isinstance(step, list):
                self._due = step
            else:
                self._call = step
        return Waiting.NOTHING

    def issue(self, transport: Transport) -> bool:
        """Issue the round that is due; return False if there is none, since the bucket is complete."""
        if self.is_complete:
            return False
        assert self._due is not None, "it was prepared"
        operations, self._due = self._due, None
        self._issued = perf_counter()
        self._handles = [operation.issue(transport) for operation in operations]
        self.round += 1
        return True
