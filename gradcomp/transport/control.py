"""The control channel beside the data: a key-value store that never blocks for long."""

from __future__ import annotations

from abc import ABC, abstractmethod

from gradcomp.core.errors import TransportError


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
