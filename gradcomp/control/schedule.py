"""Schedule changes levels at given steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from gradcomp.control.base import Controller, ControllerRun, Environment
from gradcomp.control.candidates import Candidate
from gradcomp.control.checks import checked, text
from gradcomp.control.fixed_plan import Entry, choices_by_name, entries_of
from gradcomp.control.timetable import Timetable
from gradcomp.core.errors import ConfigError


@dataclass(frozen=True)
class Schedule(Controller):
    """Gives layers the levels or compressors that a mapping lists by step.

        Schedule({0: 8, 500: 4, 2000: {"embedding.*": 2, "*": "topk:density=0.01"}})

    Steps count from the controller's first one, after warm-ups. An entry applies until a later one replaces it; before
    the first entry layers use their compressor of ``compression=``.

    Args:
        steps: maps each step to a level of every layer's own compressor, or to a compressor or its string form, or to a
            mapping of these by layer name or shell pattern, of which the first that matches a layer decides; layers
            that none matches keep their compressor.

    Wire: nothing.

    State: the current choices.

    Errors: ConfigError if there are no steps, if a step is not a whole number of at least 0, if a name or pattern
    matches no controlled layer (the closest names are listed), or if a layer cannot take a level, even one of a later
    step.
    """

    name: ClassVar[str] = "schedule"

    steps: Mapping[int, Candidate | Mapping[str, Candidate]]

    def __post_init__(self) -> None:
        if not isinstance(self.steps, Mapping) or not self.steps:
            raise ConfigError(f"a schedule must be a mapping of steps and not empty, got {self.steps!r}")
        for step in self.steps:
            if isinstance(step, bool) or not isinstance(step, int) or step < 0:
                raise ConfigError(f"steps of a schedule must be whole numbers of at least 0, got {step!r}")
            self._entries(step)

    def _entries(self, step: int) -> tuple[Entry, ...]:
        what, given = f"{self.name}, step {step}", self.steps[step]
        if isinstance(given, Mapping):
            return entries_of(given, what)
        return (Entry("*", checked(given, what)),)

    def begin(self, environment: Environment) -> ControllerRun:
        """Returns a run, once every step's entries are checked."""
        return Timetable(
            self.name,
            environment,
            {
                step: choices_by_name(self._entries(step), environment, f"{self.name}, step {step}")
                for step in self.steps
            },
        )

    def to_string(self) -> str:
        """Returns the name with the steps in their order and the choices in string form."""
        rows = {
            step: {entry.pattern: text(entry.choice) for entry in self._entries(step)}
            for step in sorted(self.steps)
        }
        return f"{self.name}(steps={rows})"
