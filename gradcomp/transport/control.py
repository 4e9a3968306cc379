"""The control channel, separate from the data: a key-value store that never blocks for long."""

from __future__ import annotations

import json
import os
import select
import socket
import stat
from abc import ABC, abstractmethod
from contextlib import suppress
from pathlib import Path
from typing import Any

from gradcomp.core.errors import TransportError

#: The most digits of a number that another rank published.
_MOST_COUNT_DIGITS = 15


class StoreSilentError(TransportError):
    """The store has not answered in time; it may still answer later."""


class ControlChannel(ABC):
    """Keeps small values by key that all ranks of the job see.

    Errors: :meth:`publish` and :meth:`lookup` raise StoreSilentError if the store does not answer in time, and
    TransportError if it is gone.
    """

    @abstractmethod
    def publish(self, key: str, value: bytes) -> None:
        """Set the value of a key; the last value wins."""

    @abstractmethod
    def lookup(self, key: str) -> bytes | None:
        """Return the value of a key, or None if no rank has published one."""

    def close(self) -> None:  # noqa: B027 - most channels have nothing to release
        """Release the channel's connections and threads; idempotent. The channel must not be used afterwards."""


class LocalControl(ControlChannel):
    """Serves ranks that are threads of one process, which share one instance."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    def publish(self, key: str, value: bytes) -> None:
        self._values[key] = value

    def lookup(self, key: str) -> bytes | None:
        return self._values.get(key)


class Prefixed(ControlChannel):
    """Publishes in another channel with a prefix before all keys."""

    def __init__(self, control: ControlChannel, prefix: str) -> None:
        self._control = control
        self._prefix = prefix

    def publish(self, key: str, value: bytes) -> None:
        self._control.publish(f"{self._prefix}/{key}", value)

    def lookup(self, key: str) -> bytes | None:
        return self._control.lookup(f"{self._prefix}/{key}")


def count_of(value: bytes | None) -> int:
    """Parse a count that a rank published; return 0 for everything else."""
    return int(value) if value is not None and len(value) <= _MOST_COUNT_DIGITS and value.isdigit() else 0


def numbers_of(value: bytes | None, length: int) -> list[int] | None:
    """Parse a list of ``length`` whole numbers that a rank published as JSON; return None for everything else."""
    if value is None or len(value) > length * (_MOST_COUNT_DIGITS + 3):
        return None
    try:
        found: Any = json.loads(value)
    except ValueError:
        return None
    is_list = isinstance(found, list) and len(found) == length
    return found if is_list and all(type(number) is int for number in found) else None


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
