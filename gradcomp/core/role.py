"""The role of a rank in an exchange: it trains, or it is a dedicated server."""

from __future__ import annotations

from dataclasses import dataclass

from gradcomp.core.errors import ConfigError
from gradcomp.core.scheme import Scheme


@dataclass(frozen=True)
class Role:
    """The role of ``rank``: the ranks in ``trainers`` train, the ranks before them are dedicated servers.

    Means, random draws and votes are over trainers only, as if there were no other ranks.
    """

    rank: int
    trainers: range

    @property
    def world(self) -> int:
        return self.trainers.stop

    @property
    def first(self) -> int:
        """Returns the first rank that trains, which is also the number of dedicated servers."""
        return self.trainers.start

    @property
    def all_train(self) -> bool:
        """Returns true if every rank has gradients."""
        return self.first == 0

    @property
    def trains(self) -> bool:
        """Returns true if this rank has gradients, and votes on the outcome of a step."""
        return self.rank >= self.first

    @property
    def leads(self) -> bool:
        """Returns true if this rank acts for all: in the step log, for the order of exchange buckets, to servers."""
        return self.rank == self.first

    @property
    def number(self) -> int:
        """Returns the coordinate of this rank's random draws: trainers count from 0, then servers."""
        return (self.rank - self.first) % self.world

    @property
    def remark(self) -> str:
        """Returns a remark for the log; empty if all ranks train."""
        return "" if self.all_train else f"the first {self.first} of {self.world} ranks only serve"

    def needs_all(self, what: str) -> None:
        """Raises ConfigError if there are dedicated servers, which cannot take part in ``what``."""
        if not self.all_train:
            scheme = Scheme("parameter_server", self.first, dedicated=True)
            raise ConfigError(f"{what} does not work with dedicated servers (reduction={scheme})")
