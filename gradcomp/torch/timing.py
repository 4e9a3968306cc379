"""``Timing``: when gradients are exchanged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gradcomp.core.errors import ConfigError

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
