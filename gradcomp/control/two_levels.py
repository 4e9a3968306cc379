"""The base class of controllers that switch layers between a level of low and one of high compression."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field

from gradcomp.compress import Compressor
from gradcomp.control.base import ControllerRun, Environment
from gradcomp.control.candidates import Candidate, CandidateLevels, make_candidates, resolve
from gradcomp.control.checks import checked
from gradcomp.control.levels import bytes_of
from gradcomp.control.periodic import Periodic
from gradcomp.control.periodic_run import PeriodicRun
from gradcomp.core.errors import ConfigError


@dataclass(frozen=True)
class TwoLevels(Periodic):
    """Base of the controllers between ``low`` and ``high``: two levels, or two compressors of any family.

    Of ``compression=`` only the family is used, not the level: choices go from ``low``, first, to ``high``, last.
    """

    every_steps: int = field(kw_only=True)
    low: Candidate
    high: Candidate

    def __post_init__(self) -> None:
        super().__post_init__()
        low, high = checked(self.low, "low"), checked(self.high, "high")
        if isinstance(low, Compressor) != isinstance(high, Compressor):
            raise ConfigError(
                f"low and high must both be levels, or both compressors, got {self.low!r} and {self.high!r}"
            )
        if low == high:
            raise ConfigError(f"low and high must differ, got {self.low!r} twice")

    @property
    @abstractmethod
    def start(self) -> Candidate:
        """Returns the choice of all layers until the first decision."""

    def candidates(self) -> list[Candidate]:
        return [self.low, self.high]

    def candidate_levels(self, environment: Environment) -> CandidateLevels:
        """Returns the candidates, with :attr:`start` as reference.

        ConfigError if low compression sends less than high.
        """
        begin = checked(self.start, "start")
        own = [None if c is None else resolve(c, begin) for c in environment.compressors]
        candidates = make_candidates(
            environment.layers, own, self.candidates(), environment.scheme, environment.topology
        )
        sent = [bytes_of(candidates, row) for row in range(len(candidates.choices))]
        if sum(s[0] for s in sent) < sum(s[-1] for s in sent):
            raise ConfigError(
                f"{self.name}: low compression, {self.low!r}, sends fewer bytes than high compression, {self.high!r}: "
                "swap low and high"
            )
        return candidates

    def begin(self, environment: Environment) -> ControllerRun:
        """Returns a run whose layers begin at :attr:`start`, whatever the plan says."""
        running = PeriodicRun(self, environment)
        running.choose()
        return running
