"""Waits outside of steps: one log line after a while, and an end."""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import monotonic, sleep

from gradcomp.core.config import Config
from gradcomp.core.errors import TransportError
from gradcomp.transport.base import Handle

logger = logging.getLogger("gradcomp")

_LOOK_SECONDS = 0.5
_LONGEST_PAUSE_SECONDS = 2e-3


def hold(
    done: Callable[[], bool],
    config: Config,
    say: Callable[[], str],
    look: Callable[[float], None] = lambda seconds: None,
) -> bool:
    """Wait until ``done``; False after ``timeout_seconds``.

    After ``stall_warning_seconds`` what ``say`` returns is logged, once. ``look`` is called twice a second with the
    seconds so far; it raises to end the wait.
    """
    begin = looked = monotonic()
    warned, pause = False, 20e-6
    while not done():
        sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
        now = monotonic()
        if now - looked < _LOOK_SECONDS:
            continue
        looked = now
        look(now - begin)
        if now - begin >= config.timeout_seconds:
            return False
        if not warned and now - begin >= config.stall_warning_seconds:
            warned = True
            logger.warning("%s", say())
    return True


def patient(config: Config, what: str) -> Callable[[Handle], None]:
    """Waits for collectives of construction: TransportError at the deadline. ``what`` stands after "waits for"."""

    def wait_for(handle: Handle) -> None:
        if not hold(handle.poll, config, lambda: f"this rank waits for {what}"):
            raise TransportError(f"this rank waited {config.timeout_seconds:.0f} s for {what}")

    return wait_for
