"""Connections of this process that belong to a library: found by their descriptors, and cut."""

from __future__ import annotations

import os
import select
import socket
import stat
from contextlib import suppress
from pathlib import Path


def open_sockets() -> dict[int, int]:
    """Descriptors of this process's sockets, and their inodes, by which one tells whether it is still the same."""
    found = {}
    with suppress(OSError):  # a system without it
        for entry in Path("/dev/fd").iterdir():
            with suppress(OSError):  # the directory's own descriptor is gone by now
                status = os.fstat(int(entry.name))
                if stat.S_ISSOCK(status.st_mode):
                    found[int(entry.name)] = status.st_ino
    return found


def hung_up(descriptor: int, inode: int) -> bool:
    """Whether the other side has ended a connection on which nothing is awaited; so has one that is gone here."""
    try:
        if os.fstat(descriptor).st_ino != inode:
            return True
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        return bool(poll.poll(0))
    except OSError:
        return True


def cut(descriptor: int, inode: int) -> None:
    """End a connection both ways, without closing it: who waits on it hears that at once."""
    if open_sockets().get(descriptor) != inode:
        return
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
        connection.shutdown(socket.SHUT_RDWR)
