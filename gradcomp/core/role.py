"""What a rank of an exchange is for: it trains, or it only serves those that do."""

from __future__ import annotations

from dataclasses import dataclass

from gradcomp.core.errors import ConfigError
from gradcomp.core.scheme import Scheme


@dataclass(frozen=True)
class Role:
    """The role of ``rank``. The ranks in ``trainers`` train, and those before them only serve.

    What is averaged, drawn and voted on is the trainers', as if there were no more ranks than those.
    """

    rank: int
    trainers: range

    @property
    def world(self) -> int:
        """How many ranks there are."""
        return self.trainers.stop

    @property
    def first(self) -> int:
        """The first rank that trains, which is how many only serve."""
        return self.trainers.start

    @property
    def all_train(self) -> bool:
        """Whether every rank has gradients."""
        return self.first == 0

    @property
    def trains(self) -> bool:
        """Whether this rank has gradients, and a say in what becomes of a step."""
        return self.rank >= self.first

    @property
    def leads(self) -> bool:
        """Whether this rank speaks for all: in the log lines about steps, for the order of buckets, to servers."""
        return self.rank == self.first

    @property
    def number(self) -> int:
        """Where this rank's draws are: trainers count from 0, then servers."""
        return (self.rank - self.first) % self.world

    @property
    def remark(self) -> str:
        """For the log; empty where all train."""
        return "" if self.all_train else f"the first {self.first} of {self.world} ranks only serve"

    def needs_all(self, what: str) -> None:
        """ConfigError if some ranks only serve, for ``what`` needs more of a rank than an answer to steps."""
        if not self.all_train:
            scheme = Scheme("parameter_server", self.first, dedicated=True)
            raise ConfigError(f"{what} does not work with dedicated servers (reduction={scheme})")
