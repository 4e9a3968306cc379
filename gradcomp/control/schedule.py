"""Controllers that follow known steps or fixed choices: Schedule and FixedPlan."""

from __future__ import annotations

import difflib
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, ClassVar

from gradcomp.compress import Compressor, from_string
from gradcomp.compress.policy import assigned
from gradcomp.control.base import Controller, ControllerRun, Environment, Step
from gradcomp.control.candidates import Candidate, checked, resolve, text
from gradcomp.core.errors import ConfigError, GradcompError, StateError, WireFormatError
from gradcomp.core.plan import Plan


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
        if self.choices == before:
            return False
        self.reason = f"step {number} of the controller"
        return True

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
        changes = {
            step: choices_by_name(self._entries(step), environment, f"{self.name}, step {step}")
            for step in self.steps
        }
        return Timetable(self.name, environment, changes)

    def to_string(self) -> str:
        """Returns the name with the steps in their order and the choices in string form."""
        rows = {
            step: {entry.pattern: text(entry.choice) for entry in self._entries(step)}
            for step in sorted(self.steps)
        }
        return f"{self.name}(steps={rows})"


@dataclass(frozen=True)
class Entry:
    """The choice for the layers that a name or pattern matches. ``exactly``: it is a name, not a pattern."""

    pattern: str
    choice: int | float | Compressor
    exactly: bool = False

    def matches(self, name: str) -> bool:
        return name == self.pattern or (not self.exactly and fnmatchcase(name, self.pattern))


def entries_of(mapping: Mapping[Any, Any], what: str) -> tuple[Entry, ...]:
    """Converts ``{name or pattern: choice}`` to entries in the same order; ConfigError for invalid ones."""
    for pattern in mapping:
        if not isinstance(pattern, str):
            raise ConfigError(f"{what}: layer names and patterns must be strings, got {pattern!r}")
    if not mapping:
        raise ConfigError(f"{what} is empty")
    return tuple(Entry(name, checked(choice, f"{what}, {name!r}")) for name, choice in mapping.items())


def choices_by_name(entries: Sequence[Entry], environment: Environment, what: str) -> dict[int, Compressor]:
    """Maps layer numbers to compressors: the first matching entry decides; layers without one are left out.

    Raises ConfigError for impossible levels and for entries that match no controlled layer, all of them at once. If no
    layer is controlled, entries must match some layer of the model.
    """
    own = {environment.layers[i].name: (i, c) for i, c in enumerate(environment.compressors) if c is not None}
    names = list(own) or [layer.name for layer in environment.layers]
    unmatched = [entry.pattern for entry in entries if not any(map(entry.matches, names))]
    if unmatched:
        shown = "; ".join(_with_closest(pattern, names) for pattern in unmatched)
        raise ConfigError(f"{what}: no controlled layer matches {shown}")
    choices: dict[int, Compressor] = {}
    for name, (number, compressor) in own.items():
        entry = next((entry for entry in entries if entry.matches(name)), None)
        if entry is not None:
            choices[number] = resolve(compressor, entry.choice)
    return choices


def _with_closest(pattern: str, names: list[str]) -> str:
    close = difflib.get_close_matches(pattern, names, n=3, cutoff=0.0)
    return f"{pattern!r} (closest: {', '.join(map(repr, close))})" if close else repr(pattern)


@dataclass(frozen=True)
class FixedPlan(Controller):
    """Gives each layer a level or compressor from a file or a mapping, from the controller's first step on.

    The file is JSON, ``{"layer name or shell pattern": choice, ...}``, where a choice is a level of the layer's own
    compressor or the string form of any other:

        {"embedding.*": 2, "layers.3.*": "topk:density=0.01", "*": 4}

    The first name or pattern that matches decides, and a layer that none matches keeps its compressor. The text of
    ``Plan.to_json()`` is accepted too: its names are not patterns, layers that it lacks keep their compressor, and for
    layers that are sent exactly it must say so.

    Args:
        plan: path of the file, its JSON text (which begins with ``{``), the mapping itself, or a :class:`Plan`.

    Wire: nothing. Ranks compare the plans by a digest of the content at the start; paths may differ.

    State: the current choices, so that a run that continues under another plan changes to it after its first step.

    Errors: ConfigError if the file cannot be read or is not such a mapping, if a name or pattern matches no controlled
    layer (the closest names are listed), or if a layer cannot take its level.
    """

    name: ClassVar[str] = "fixed_plan"

    plan: str | os.PathLike[str] | Mapping[str, Candidate] | Plan
    entries: tuple[Entry, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        plan = self.plan
        if isinstance(plan, str | os.PathLike):
            plan = _parsed(plan)
        if isinstance(plan, Plan):
            entries = tuple(Entry(a.layer, assigned(a), exactly=True) for a in plan.assignments)
        elif isinstance(plan, Mapping):
            entries = entries_of(plan, self.name)
        else:
            raise ConfigError(f"a fixed plan must be a path, a mapping or a Plan, got {plan!r}")
        object.__setattr__(self, "entries", entries)

    def begin(self, environment: Environment) -> ControllerRun:
        """Returns a run whose choices apply before the controller's first step."""
        pairs = zip(environment.layers, environment.compressors, strict=True)
        exact = {layer.name for layer, compressor in pairs if compressor is None}
        rest = []
        for entry in self.entries:
            if not (entry.exactly and entry.pattern in exact):
                rest.append(entry)
                continue
            assert isinstance(entry.choice, Compressor), "plans hold compressors"
            if not entry.choice.traits.exact:
                raise ConfigError(
                    f"{self.name}: layer {entry.pattern!r} is not controlled and is sent exactly, but the plan "
                    f"says {entry.choice.to_string()}"
                )
        return Timetable(self.name, environment, {0: choices_by_name(rest, environment, self.name)})

    def to_string(self) -> str:
        """Returns the name with a digest of the content, which differs between ranks that read different files."""
        rows = [[entry.pattern, text(entry.choice), entry.exactly] for entry in self.entries]
        return f"{self.name}(sha256={hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]})"


def _parsed(source: str | os.PathLike[str]) -> Mapping[str, Any] | Plan:
    """Parses JSON text, or a file with it."""
    where, found = "the text of a fixed plan", source
    if not (isinstance(source, str) and source.lstrip().startswith("{")):
        where = f"the fixed plan in {os.fspath(source)}"
        try:
            found = Path(source).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot read {where}: {error}") from error
    assert isinstance(found, str), "a path was read"
    try:
        data = json.loads(found, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{where} is not a mapping of layer names, got {type(data).__name__}")
    if data.keys() == {"version", "assignments"}:
        try:
            return Plan.from_json(found)
        except WireFormatError as error:
            raise ConfigError(f"{where}: {error}") from error
    return data


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    twice = sorted({key for key in keys if keys.count(key) > 1})
    if twice:
        raise ValueError(f"{', '.join(map(repr, twice))} appears twice")
    return dict(pairs)
