"""Connections that a library of this process has opened are found by their descriptors, and can be ended."""

from __future__ import annotations

import os
import select
import socket
import stat
from contextlib import suppress
from pathlib import Path


def open_sockets() -> dict[int, int]:
    """Return the descriptors of this process's sockets, with their inodes.

    A descriptor with another inode belongs to another socket now.
    """
    found = {}
    with suppress(OSError):  # not every system has /dev/fd
        for entry in Path("/dev/fd").iterdir():
            with suppress(OSError):  # the descriptor of the directory itself is closed by now
                status = os.fstat(int(entry.name))
                if stat.S_ISSOCK(status.st_mode):
                    found[int(entry.name)] = status.st_ino
    return found


def hung_up(descriptor: int, inode: int) -> bool:
    """Return true if the other side has ended a connection, or if the connection is closed here.

    It is meant for a connection on which no data is expected, since data that can be read counts as its end.
    """
    try:
        if os.fstat(descriptor).st_ino != inode:
            return True
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        return bool(poll.poll(0))
    except OSError:
        return True


def cut(descriptor: int, inode: int) -> None:
    """Shut a connection down both ways without closing it, so that a thread that waits on it returns at once."""
    if open_sockets().get(descriptor) != inode:
        return
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
        connection.shutdown(socket.SHUT_RDWR)
