"""What the ranks of a job met through: it makes communicators, and has the control channel."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from gradcomp.transport.base import Transport
from gradcomp.transport.control import ControlChannel

#: Numbers of the job's ranks, ascending.
Ranks = tuple[int, ...]


class Network(ABC):
    """The ranks of one job. ``ranks``: what the engine calls them; rank i of the job is its number ``ranks[i]``.

    ``engine``: the transport that :meth:`group` makes, by its name among the settings.
    """

    engine: str
    ranks: Ranks
    #: Whether others than the ranks may reach what :meth:`control` reads, so that it must be signed.
    exposed: bool = False
    #: This process's number in the job.
    rank: int

    @abstractmethod
    def group(self, ranks: Ranks, timeout_seconds: float) -> Transport:
        """A new communicator; collective over ``ranks``, numbers of the job."""

    @abstractmethod
    def control(self, life: int, timeout_seconds: float) -> ControlChannel:
        """The job's small values. Local. Each ``life`` of gradcomp, from init to shutdown, has its own."""

    def members(self, group: Any) -> Ranks | None:
        """The ranks of a group that the engine's user has made; None if this is none. ConfigError for strangers."""
        return None

    def finish(self, timeout_seconds: float) -> None:  # noqa: B027 - most engines can be left at any time
        """This rank has done its work without an error: from here on it ends no other rank, however long that takes."""

    def close(self) -> None:  # noqa: B027 - most have nothing to release
        """The job is over; communicators are closed or abandoned by then."""

    def describe(self) -> str:
        """The engine with its version, for the banner."""
        return self.engine


class Alone(Network):
    """A world of one: nobody to meet."""

    engine = "none"
    ranks = (0,)
    rank = 0

    def group(self, ranks: Ranks, timeout_seconds: float) -> Transport:
        """Never called."""
        raise AssertionError("a world of one exchanges nothing")

    def control(self, life: int, timeout_seconds: float) -> ControlChannel:
        """Never called."""
        raise AssertionError("a world of one exchanges nothing")
