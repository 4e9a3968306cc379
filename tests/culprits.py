"""What rank 0 of two says of rank 1, without an exchanger."""

from __future__ import annotations

from gradcomp import Config
from gradcomp.engine import Watchdog
from gradcomp.engine.keys import Position
from gradcomp.engine.watch import Roster, StepWatch
from gradcomp.transport.control import ControlChannel


def culprits(control: ControlChannel, position: Position) -> str:
    """Rank 0 waits at this position, in scope ``x``."""
    watchdog = Watchdog(control, 0)
    watch = StepWatch(watchdog, Config(), "x", 0, Roster.of_size(2), lambda: position, str)
    return watch.culprits()
