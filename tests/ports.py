"""Ports for the jobs that tests start: no two jobs get the same, and no client of the system takes one first."""

from __future__ import annotations

import fcntl
import os
import socket
import tempfile
from pathlib import Path

#: Below the ports that systems give to clients and to listeners on port 0 (from 32768 on Linux).
_FIRST, _COUNT = 20000, 12000


def free_port() -> int:
    """A port that nothing listens on, and that no other call gets before 12,000 calls of this user's processes."""
    counter = Path(tempfile.gettempdir()) / f"gradcomp-test-ports-{os.getuid()}"
    with counter.open("a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        turn = int(file.read() or 0)
        for taken in range(_COUNT):
            port = _FIRST + (turn + taken) % _COUNT
            if _can_listen(port):
                file.truncate(0)
                file.write(b"%d" % (turn + taken + 1))
                return port
    raise OSError(f"all ports from {_FIRST} to {_FIRST + _COUNT - 1} are taken")


def _can_listen(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
