"""The run of controllers that change choices at known steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gradcomp.compress import Compressor, from_string
from gradcomp.control.base import ControllerRun, Environment, Step
from gradcomp.core.errors import GradcompError, StateError


@dataclass
class TimetableState:
    """The saved state: ``choices`` maps layer names to string forms."""

    choices: dict[str, str]


class Timetable(ControllerRun):
    """Changes choices at known steps: ``changes[n]`` applies from the controller's n-th step until a later entry.

    Nothing is communicated, since the choices are a function of the step. The state holds them nevertheless, so that a
    run that continues under another timetable changes over after its first step.
    """

    def __init__(
        self, name: str, environment: Environment, changes: Mapping[int, Mapping[int, Compressor]]
    ) -> None:
        super().__init__(name, environment)
        self._changes = dict(sorted(changes.items()))
        self.choices = self._at(0)

    def _at(self, number: int) -> dict[int, Compressor]:
        found: dict[int, Compressor] = {}
        for begin, choices in self._changes.items():
            if begin <= number:
                found.update(choices)
        return found

    def finish(self, step: Step) -> bool:
        """Switches to the choices of the next step."""
        number = step.number + 1 - self.environment.first_step
        before, self.choices = self.choices, self._at(number)
        changed = self.choices != before
        if changed:
            self.reason = f"step {number} of the controller"
        return changed

    @property
    def state(self) -> TimetableState:
        layers = self.environment.layers
        return TimetableState({layers[i].name: c.to_string() for i, c in self.choices.items()})

    def adopt(self, saved: TimetableState, own: Mapping[str, Mapping[str, Any]]) -> None:
        """Restores the choices that were in force; if others are due, they follow at the end of the next step."""
        numbers = {layer.name: i for i, layer in enumerate(self.environment.layers)}
        try:
            found = {name: from_string(form) for name, form in saved.choices.items()}
        except GradcompError as error:
            raise StateError(f"not a state of {self.name}: {error!r}") from error
        self.choices = {numbers[name]: c for name, c in found.items() if name in numbers}
