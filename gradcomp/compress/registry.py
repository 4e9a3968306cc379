"""The registry finds compressors by name and parses string forms: ``"quantize:bits=4"`` is ``Quantize(bits=4)``.

A compressor's name is written in one place, above its class: ``@register("quantize")``. A script may register its own
compressor, on every rank; other packages name theirs under the entry point group ``gradcomp.compressors``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache, lru_cache
from importlib.metadata import entry_points
from typing import TypeVar

from gradcomp.compress.base import Compressor
from gradcomp.core import plan as levels
from gradcomp.core.errors import ConfigError
from gradcomp.core.plan import Level
from gradcomp.core.registry import COMPRESSORS, CONTRIB, contributed
from gradcomp.core.strings import (
    Form,
    arguments_of,
    build,
    closest,
    head_of,
    hint,
    hinted,
    is_word,
    split,
    value_of,
)

C = TypeVar("C", bound=Compressor)

#: Compressors by name, without those of entry points.
REGISTERED: dict[str, type[Compressor]] = {}
#: Compressors by their short names, such as ``fp16``.
_SHORT: dict[str, Compressor] = {}
#: Names that earlier versions used, and the current names. Plans in checkpoints may contain them. They are refused.
_RENAMED = {"graded": "two_level_selection"}
#: Names of controllers, and how to choose each; for the error if one is given as a compressor.
OF_CONTROLLERS: dict[str, str] = {}


def register(name: str) -> Callable[[type[C]], type[C]]:
    """Return a decorator that registers a class under ``name``. It raises ValueError if another class has the name."""

    def decorate(kind: type[C]) -> type[C]:
        if name in COMPRESSORS and kind.__module__ != CONTRIB[COMPRESSORS[name][0]]:
            contributed(COMPRESSORS[name][0])  # this import registers the class of contrib first
        if name in REGISTERED:
            raise ValueError(f"{REGISTERED[name].__name__} is named {name!r} already")
        kind.name = name
        REGISTERED[name] = kind
        if kind.level_field is not None:
            levels.LEVELS[name] = kind.level_field
        registered.cache_clear()
        return kind

    return decorate


def abbreviate(short: str, compressor: Compressor) -> None:
    """Make ``short``, which takes no fields, a string form of this compressor."""
    _SHORT[short] = compressor


@cache
def registered() -> dict[str, type[Compressor]]:
    """Return all compressor classes by name, with those of entry points. ConfigError for an invalid entry point."""
    of_contrib = {name: contributed(feature) for name, (feature, _) in COMPRESSORS.items()}
    found = {**REGISTERED, **of_contrib}
    for point in entry_points(group="gradcomp.compressors"):
        loaded = point.load()
        if not (isinstance(loaded, type) and issubclass(loaded, Compressor)):
            raise ConfigError(f"entry point {point.name} of gradcomp.compressors is not a Compressor")
        if found.setdefault(loaded.name, loaded) is not loaded:
            raise ConfigError(f"two compressors are named {loaded.name!r}")
    return found


def from_string(text: str) -> Compressor:
    """Parse a string form. If it is invalid, a ConfigError gives the reason and, if possible, suggests a correction."""
    try:
        return _parse(text, None)
    except ConfigError as error:
        raise hinted(error, _hint(text)) from error.__cause__


def _hint(text: str) -> str:
    name = head_of(text)
    if name in _SHORT:
        return ""  # the error already says how to write it
    meant = closest(name, [*registered(), *_SHORT, *OF_CONTROLLERS])
    if meant in OF_CONTROLLERS and not is_word(name):
        return f" ({meant} is a controller: {OF_CONTROLLERS[meant]})"
    forms = {name: Form.of(kind, kind.level_field) for name, kind in registered().items()}
    forms |= {short: Form({}, None, wraps=False) for short in _SHORT}
    return hint(text, forms, lambda one: _parse(one, None), "quantize:bits=4")


def _parse(text: str, level: Level) -> Compressor:
    """Parse a string form; a ``level`` that is not None replaces the one in the text or the default."""
    name, inner, rest = split(text.strip())
    if name in _SHORT:
        if rest or inner is not None:
            raise ConfigError(
                f"{name} takes no fields and wraps nothing; write {_SHORT[name].to_string()!r} and change that"
            )
        return _SHORT[name].with_level(level)
    kind = registered().get(name)
    if kind is None:
        if name in _RENAMED:
            raise ConfigError(f"the compressor {name!r} is called {_RENAMED[name]!r} now")
        raise ConfigError(
            f"unknown compression {name!r}; known: {', '.join(sorted([*registered(), *_SHORT]))}"
        )
    fields = {f.name for f in dataclasses.fields(kind)}
    if ("inner" in fields) != (inner is not None):
        raise ConfigError(
            f"{text!r}: {name} wraps another compressor: name it in square brackets"
            if inner is None
            else f"{text!r}: {name} wraps nothing: leave out the square brackets"
        )
    wrapped = {} if inner is None else {"inner": _parse(inner, level)}
    arguments = arguments_of(text, rest, fields - {"inner"}, lambda _, value: value_of(value, _nested))
    if level is not None and inner is None:
        if kind.level_field is None:
            raise ConfigError(f"{name} has no level, got {level!r}")
        arguments[kind.level_field] = level
    return build(kind, text, wrapped | arguments)


def _nested(text: str) -> Compressor:
    return _parse(text, None)


# Plans name a few compressors many times. The cache is typed, because a level of 4 may be valid where 4.0 is not.
@lru_cache(maxsize=4096, typed=True)
def at_level(family: str, level: Level) -> Compressor:
    """Return the compressor of a family string form at a level; a plan stores each compressor as these two values."""
    # with_level would build the compressor at its default level first, which its other fields may not allow.
    return _parse(family, level)
