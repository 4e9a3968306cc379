"""A notice that one rank will be stopped becomes a fact of all ranks with the headers of the next exchange."""

from __future__ import annotations

import logging

from gradcomp.reduce.header import PREEMPTED

logger = logging.getLogger("gradcomp")


class Preemption:
    """Holds what this rank was told and what all ranks know.

    ``requested``: this rank was told that it will be stopped. A signal handler may set it at any time. ``agreed``: an
    exchange of all ranks has said so of some rank. It is set where the training thread waits for the exchange, so that
    all ranks read the same after the same step.
    """

    def __init__(self) -> None:
        self.requested = False
        self.agreed = False

    @property
    def bits(self) -> int:
        """Return the bit that the headers of an exchange carry from this rank; it is read once for each exchange."""
        return PREEMPTED if self.requested else 0

    def hear(self, notices: int) -> None:
        """Take note of the bits that an exchange has united over all ranks."""
        if notices & PREEMPTED and not self.agreed:
            self.agreed = True
            if self.requested:
                logger.warning(
                    "this rank was told to stop, and all ranks know it now: gc.preempted() is True"
                )
