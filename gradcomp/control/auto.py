"""Auto chooses the least compression that hides the communication on this network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from gradcomp.compress import Compressor
from gradcomp.compress.policy import AUTO_CHOICES, resolve
from gradcomp.control.auto_run import AutoRun
from gradcomp.control.auto_state import Limits
from gradcomp.control.base import Controller, Environment
from gradcomp.control.checks import check_count, check_positive
from gradcomp.core.errors import ConfigError


@dataclass(frozen=True)
class Auto(Controller):
    """Chooses the least compression that hides the communication; on a network that is fast enough, none.

    A run starts with the first choice. After its first steps, ``warmup_steps`` steps are observed to learn when
    gradients become ready and how long a step computes; the slowest rank counts. Meanwhile another thread times the
    codec of each choice. Then the link is measured, and its rate is fitted so that the step predicted for the current
    choice takes as long as the measured one. With that link a step is predicted for each choice
    (:mod:`gradcomp.control.forecast`). Candidates are the choices up to the first whose exposed communication is at
    most ``hidden`` of the computing time, or all choices if nothing hides the communication; Auto takes the candidate
    with the shortest predicted step. A choice that compresses more must shorten the predicted step by more than 2%.

    A prediction cannot include everything, such as a busy core, so the steps that follow a change are compared with
    those before it. If their median is longer than before a change to more compression, or longer by more than
    ``hidden`` + 2% than before a change to less compression, the previous choice returns. Every ``check_every`` steps
    ranks compare their step times with those after the decision. If the mean over ranks of the median differs by more
    than the fraction ``drift``, steps and link are measured again and the choice is made again.

    A choice applies to every controlled layer; excluded layers stay exact.

    Args:
        choices: compressors or string forms, from least to most compression. The default ends at 4 bits, at which the
            accuracy of training without compression is recovered on all models of Markov et al. 2024 and Markov
            2024; choose more only where you know that it does no harm.
        warmup_steps: steps to observe before a choice.
        hidden: fraction of the computing time that exposed communication may take.
        drift: relative change of the step time after which the choice is made again.
        check_every: steps between two comparisons of the step time.

    Wire: for each decision, one probe of the link between steps (6 messages of 1 KiB and of 1 MiB a rank), a sum over
    ranks of N (2 + buckets + 2 choices) float64, and one of 4 + choices; one float64 for each comparison of step times.

    State: a few numbers, and the times of the steps that are being observed.

    Errors: ConfigError for an empty list, for a choice that is unknown, repeated, has a schedule, momentum or clipping,
    for numbers that are not positive, and for layers whose own compressor has momentum or clipping.
    """

    name: ClassVar[str] = "auto"

    choices: Sequence[Compressor | str] = AUTO_CHOICES
    warmup_steps: int = 10
    hidden: float = 0.05
    drift: float = 0.3
    check_every: int = 100

    def __post_init__(self) -> None:
        if isinstance(self.choices, str | Compressor) or not self.choices:
            raise ConfigError(
                f"choices must be a list of one or more compressors or string forms, got {self.choices!r}"
            )
        resolved = tuple(map(resolve, self.choices))
        if len(set(resolved)) < len(resolved):
            raise ConfigError(f"a choice is given twice: {', '.join(c.to_string() for c in resolved)}")
        for choice in resolved:
            if choice.changes or choice.traits.preconditions:
                raise ConfigError(
                    f"{choice.to_string()} cannot be one of several choices: it has a schedule, momentum or clipping"
                )
        object.__setattr__(self, "choices", resolved)
        check_count("warmup_steps", self.warmup_steps)
        check_count("check_every", self.check_every)
        check_positive("hidden", self.hidden)
        check_positive("drift", self.drift)

    @property
    def by_times(self) -> bool:
        return True

    def begin(self, environment: Environment) -> AutoRun:
        own = [c for c in environment.compressors if c is not None and c.traits.preconditions]
        if own:
            raise ConfigError(
                f"{own[0].to_string()} has momentum or clipping, which auto would drop when it replaces the compressor"
            )
        limits = Limits(self.warmup_steps, self.hidden, self.drift, self.check_every)
        return AutoRun(self.name, tuple(map(resolve, self.choices)), limits, environment)
