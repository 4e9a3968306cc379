"""Defines ``Network``, through which the ranks of a job have met and make communicators and control channels."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from gradcomp.transport.base import Transport
from gradcomp.transport.control import ControlChannel

#: Numbers of the job's ranks, ascending.
Ranks = tuple[int, ...]


class Network(ABC):
    """Connects the ranks of one job.

    ``ranks``: the engine's own numbers of them; rank i of the job is the engine's ``ranks[i]``. ``engine``: the
    transport that :meth:`group` makes, by its name in the settings.
    """

    engine: str
    ranks: Ranks
    #: True if processes outside the job may write what :meth:`control` reads, so that values must be signed.
    exposed: bool = False
    #: This process's number in the job.
    rank: int

    @abstractmethod
    def group(self, ranks: Ranks, timeout_seconds: float) -> Transport:
        """Make a communicator. Collective over ``ranks``, which are numbered as in the job."""

    @abstractmethod
    def control(self, life: int, timeout_seconds: float) -> ControlChannel:
        """Connect to the job's small values. Local. Each ``life``, from init to shutdown, has its own values."""

    def members(self, group: Any) -> Ranks | None:
        """Return the ranks of a group made with the engine, or None for other objects.

        ConfigError for a group with ranks outside the job.
        """
        return None

    def finish(self, timeout_seconds: float) -> None:  # noqa: B027 - most engines can be left at any time
        """Note that this rank has ended without an error: it waits for the others, and its end must not end them."""

    def close(self) -> None:  # noqa: B027 - most have nothing to release
        """Release the engine's resources. Communicators were closed or abandoned before."""

    def describe(self) -> str:
        """Return the engine with its version, for the banner."""
        return self.engine


class Alone(Network):
    """Stands for a world of one, in which nothing is exchanged."""

    engine = "none"
    ranks = (0,)
    rank = 0

    def group(self, ranks: Ranks, timeout_seconds: float) -> Transport:
        raise AssertionError("a world of one exchanges nothing")

    def control(self, life: int, timeout_seconds: float) -> ControlChannel:
        raise AssertionError("a world of one exchanges nothing")
