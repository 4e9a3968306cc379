"""The control channel beside the data: a key-value store that never blocks for long."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from typing import Any

from gradcomp.core.errors import TransportError

#: Of a number that another rank published.
_MOST_COUNT_DIGITS = 15


class StoreSilentError(TransportError):
    """The store has not answered yet; it may do so later."""


class ControlChannel(ABC):
    """Small values by key, seen by all ranks of the job.

    Both calls raise StoreSilentError if the store does not answer in time, TransportError if it is gone.
    """

    @abstractmethod
    def publish(self, key: str, value: bytes) -> None:
        """Set a value; the last one wins."""

    @abstractmethod
    def lookup(self, key: str) -> bytes | None:
        """The value, or None if nobody has published one."""

    def close(self) -> None:  # noqa: B027 - most have nothing to release
        """End what belongs to the channel. Idempotent; it is not used afterwards."""


class LocalControl(ControlChannel):
    """For ranks that are threads of one process: share one instance."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    def publish(self, key: str, value: bytes) -> None:
        """Set a value."""
        self._values[key] = value

    def lookup(self, key: str) -> bytes | None:
        """Get a value."""
        return self._values.get(key)


class Prefixed(ControlChannel):
    """A part of another channel: all keys have a prefix."""

    def __init__(self, control: ControlChannel, prefix: str) -> None:
        self._control = control
        self._prefix = prefix

    def publish(self, key: str, value: bytes) -> None:
        """Set a value."""
        self._control.publish(f"{self._prefix}/{key}", value)

    def lookup(self, key: str) -> bytes | None:
        """Get a value."""
        return self._control.lookup(f"{self._prefix}/{key}")


def count_of(value: bytes | None) -> int:
    """A count that was published; 0 for everything that is none."""
    return int(value) if value is not None and len(value) <= _MOST_COUNT_DIGITS and value.isdigit() else 0


def numbers_of(value: bytes | None, length: int) -> list[int] | None:
    """A list of ``length`` whole numbers that was published as JSON; None for everything else."""
    if value is None or len(value) > length * (_MOST_COUNT_DIGITS + 3):
        return None
    try:
        found: Any = json.loads(value)
    except ValueError:
        return None
    is_list = isinstance(found, list) and len(found) == length
    return found if is_list and all(type(number) is int for number in found) else None
