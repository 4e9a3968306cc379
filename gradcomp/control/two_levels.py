"""What controllers have in common that move layers between a level of low and one of high compression."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field

from gradcomp.compress import Compressor
from gradcomp.control.base import Pilot, Setting
from gradcomp.control.checks import checked
from gradcomp.control.ladders import bytes_of
from gradcomp.control.menu import Candidate, Menu, make_menu, resolve
from gradcomp.control.periodic import Periodic
from gradcomp.control.periodic_pilot import PeriodicPilot
from gradcomp.core.errors import ConfigError


@dataclass(frozen=True)
class TwoLevels(Periodic):
    """Base of the controllers between ``low`` and ``high``: two levels, or two compressors of any family.

    Of ``compression=``, the family counts and not the level: choices are ``low``, first, to ``high``, last.
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
        """What layers travel as until the first decision."""

    def candidates(self) -> list[Candidate]:
        """``low``, then ``high``."""
        return [self.low, self.high]

    def menu(self, setting: Setting) -> Menu:
        """The candidates, with :attr:`start` for a reference. ConfigError if low compression sends less than high."""
        begin = checked(self.start, "start")
        own = [None if c is None else resolve(c, begin) for c in setting.compressors]
        menu = make_menu(setting.layers, own, self.candidates(), setting.scheme, setting.topology)
        sent = [bytes_of(menu, row) for row in range(len(menu.choices))]
        if sum(s[0] for s in sent) < sum(s[-1] for s in sent):
            raise ConfigError(
                f"{self.name}: low compression, {self.low!r}, sends fewer bytes than high compression, {self.high!r}: "
                "exchange them"
            )
        return menu

    def begin(self, setting: Setting) -> Pilot:
        """Layers begin at :attr:`start`, whatever the plan says."""
        pilot = PeriodicPilot(self, setting)
        pilot.choose()
        return pilot
