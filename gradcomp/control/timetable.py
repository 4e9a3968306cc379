"""A pilot that changes choices at known steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gradcomp.compress import Compressor, from_string
from gradcomp.control.base import Pilot, Setting, Step
from gradcomp.core.errors import GradcompError, StateError


class Timetable(Pilot):
    """``changes[n]``: what layers take in the n-th step that is the controller's, and keep until a later entry.

    Nothing is communicated: what is in force is a function of the step. The state holds it all the same, so that a run
    that goes on under another timetable changes over after its first step.
    """

    def __init__(self, name: str, setting: Setting, changes: Mapping[int, Mapping[int, Compressor]]) -> None:
        super().__init__(name, setting)
        self._changes = dict(sorted(changes.items()))
        self.choices = self._at(0)

    def _at(self, number: int) -> dict[int, Compressor]:
        found: dict[int, Compressor] = {}
        for begin, choices in self._changes.items():
            if begin <= number:
                found.update(choices)
        return found

    def finish(self, step: Step) -> bool:
        """Take what holds for the next step."""
        number = step.number + 1 - self.setting.first_step
        before, self.choices = self.choices, self._at(number)
        changed = self.choices != before
        if changed:
            self.reason = f"its step {number}"
        return changed

    def shared_state(self) -> dict[str, Any]:
        """The choices in force, by layer name."""
        layers = self.setting.layers
        return {"choices": {layers[i].name: c.to_string() for i, c in self.choices.items()}}

    def restore(self, shared: Mapping[str, Any], own: Mapping[str, Mapping[str, Any]]) -> None:
        """What was in force; what should be, if it differs, comes with the end of the next step."""
        numbers = {layer.name: i for i, layer in enumerate(self.setting.layers)}
        try:
            saved = {str(name): from_string(form) for name, form in shared["choices"].items()}
        except (KeyError, TypeError, AttributeError, GradcompError) as error:
            raise StateError(f"not a state of {self.name}: {error!r}") from error
        self.choices = {numbers[name]: c for name, c in saved.items() if name in numbers}
