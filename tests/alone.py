"""Turns of the workers of pytest-xdist: a test that looks at the clock has the machine to itself."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

_DOOR = Path(__file__)
_ROOM = Path(__file__).with_name("conftest.py")


@contextlib.contextmanager
def turn(exclusive: bool) -> Iterator[None]:
    """Hold a turn: shared with other workers, or exclusive. Without workers there is nobody to wait for.

    A turn is a lock of a file of this folder. Whoever waits for an exclusive one keeps the door, through which all
    turns begin, so that no worker that goes from test to test overtakes it.
    """
    if "PYTEST_XDIST_WORKER" not in os.environ:
        yield
        return
    with contextlib.ExitStack() as held:
        with contextlib.ExitStack() as waiting:
            _lock(_DOOR, fcntl.LOCK_EX, waiting)
            _lock(_ROOM, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH, held)
        yield


def _lock(path: Path, kind: int, stack: contextlib.ExitStack) -> None:
    file = stack.enter_context(path.open("rb"))
    fcntl.flock(file, kind)
    stack.callback(fcntl.flock, file, fcntl.LOCK_UN)  # closing does not, where a test has forked
