"""``Timing``: when gradients are exchanged."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Literal

from gradcomp.core.errors import ConfigError

logger = logging.getLogger("gradcomp")

#: So many steps in a row that took several exchanges, always as many, are no accident.
_LIMIT = 3

Finish = Literal["backward", "step"]
OnSkip = Literal["raise", "agree"]


@dataclass(frozen=True)
class Timing:
    """When gradients are exchanged.

    ``passes``: backward passes per exchange. ``finish="backward"``: when the last of them returns, gradients are means;
    ``"step"``: when ``synchronize()`` or ``step()`` returns, for several backward passes over disjoint parameters.
    ``on_skip``: what follows when a rank does not step on means that others step on: an error on all ranks, or all ask
    each other before they step.
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
    """Notices windows of accumulation whose passes were not declared, so that each is an exchange; warns once.

    ``kept``: exchanges since the last step whose means were added to.
    """

    def __init__(self) -> None:
        self.kept = 0
        self._before = 0
        self._alike = 0
        self._warned = False

    def stepped(self, timing: Timing, *, speaks: bool) -> None:
        """The window ends with a step on means; ``speaks``: this rank may warn."""
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
