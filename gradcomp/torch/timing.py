"""``Timing`` tells when gradients are exchanged; ``Windows`` warns of accumulation that was not declared."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Literal

from gradcomp.core.errors import ConfigError

logger = logging.getLogger("gradcomp")

#: A warning needs this many steps in a row that took the same number of exchanges, more than one.
_LIMIT = 3

Finish = Literal["backward", "step"]
OnSkip = Literal["raise", "agree"]


@dataclass(frozen=True)
class Timing:
    """The number of backward passes in an exchange, and the moment when its means must be there.

    ``passes`` is the number of backward passes per exchange. With ``finish="backward"`` gradients are means
    when the last of these passes returns; with ``"step"`` when ``synchronize()`` or ``step()`` returns, for
    several backward passes over disjoint parameters. ``on_skip`` tells what happens when a rank skips a step
    that others take: ``"raise"`` an error on all ranks, or ``"agree"`` on each step before it is taken.
    """

    passes: int = 1
    finish: Finish = "backward"
    on_skip: OnSkip = "raise"

    def __post_init__(self) -> None:
        if not isinstance(self.passes, int) or self.passes < 1:
            raise ConfigError(
                f"backward_passes_per_step must be a whole number of at least 1, got {self.passes!r}"
            )
        if self.finish not in ("backward", "step"):
            raise ConfigError(f'finish must be "backward" or "step", got {self.finish!r}')
        if self.on_skip not in ("raise", "agree"):
            raise ConfigError(f'on_skip must be "raise" or "agree", got {self.on_skip!r}')


class Windows:
    """Warns once if accumulation windows are exchanged pass by pass because their passes were not declared.

    ``kept`` counts exchanges since the last step whose means were added to.
    """

    def __init__(self) -> None:
        self.kept = 0
        self._before = 0
        self._alike = 0
        self._warned = False

    def stepped(self, timing: Timing, *, speaks: bool) -> None:
        """End the window with a step on means; ``speaks`` if this rank may warn."""
        exchanges, self.kept = self.kept + 1, 0
        self._alike = self._alike + 1 if exchanges == self._before else 1
        self._before = exchanges
        if exchanges == 1 or self._alike < _LIMIT or self._warned:
            return
        self._warned = True
        if speaks:
            logger.warning(
                "step() comes every %d exchanges, and the means of the others are only added up: "
                "backward_passes_per_step=%d, or no_sync() around all passes but the last, trains the same on 1/%d of "
                "the bytes",
                exchanges,
                exchanges * timing.passes,
                exchanges,
            )
