"""The control channel beside the data: a key-value store that never blocks for long."""

from __future__ import annotations

from abc import ABC, abstractmethod


class ControlChannel(ABC):
    """Small values by key, seen by all ranks of the job. Used by the engine's thread only.

    Both calls raise TransportError if the store is gone.
    """

    @abstractmethod
    def publish(self, key: str, value: bytes) -> None:
        """Set a value; the last one wins."""

    @abstractmethod
    def lookup(self, key: str) -> bytes | None:
        """The value, or None if nobody has published one."""


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
