"""What rank 0 of two says of rank 1, without an exchanger."""

from __future__ import annotations

from gradcomp import Config
from gradcomp.exchange.members import Roster, StepWatch
from gradcomp.exchange.watchdog import Position, Watchdog
from gradcomp.transport.control import ControlChannel


class _Waits(StepWatch):
    position = (0, 0, 0)


def culprits(control: ControlChannel, position: Position) -> str:
    """Rank 0 waits at this position, in scope ``x``."""
    watch = _Waits(Watchdog(control, 0), Config(), "x", 0, Roster.of_size(2))
    watch.position = position
    return watch.culprits()
