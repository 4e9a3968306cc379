"""String forms: ``"quantize:bits=4,bucket_size=512"`` <-> ``Quantize(bits=4, bucket_size=512)``.

A compressor's name stands in one place, above its class: ``@register("quantize")``. A script may register one of its
own, on every rank; other packages name theirs under the entry point group ``gradcomp.compressors``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache, lru_cache
from importlib.metadata import entry_points
from typing import TypeVar

from gradcomp.compress.base import Compressor
from gradcomp.core import levels
from gradcomp.core.errors import ConfigError
from gradcomp.core.forms import arguments_of, build, split, value_of
from gradcomp.core.meant import Form, closest, head_of, hint, hinted
from gradcomp.core.plan import Level

C = TypeVar("C", bound=Compressor)

#: By name, without what entry points name.
REGISTERED: dict[str, type[Compressor]] = {}
_SHORT: dict[str, Compressor] = {}
#: What plans of earlier checkpoints may say.
_RENAMED = {"graded": "two_level_selection"}
#: Names that are no compressors' and how they are asked for: controllers register theirs.
OF_CONTROLLERS: dict[str, str] = {}


def register(name: str) -> Callable[[type[C]], type[C]]:
    """Class decorator: the compressor is called ``name`` in string forms. ValueError if another one is."""

    def decorate(kind: type[C]) -> type[C]:
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
    """``short`` means this compressor, and takes no fields."""
    _SHORT[short] = compressor


@cache
def registered() -> dict[str, type[Compressor]]:
    """Every compressor by its name."""
    found = dict(REGISTERED)
    for point in entry_points(group="gradcomp.compressors"):
        loaded = point.load()
        if not (isinstance(loaded, type) and issubclass(loaded, Compressor)):
            raise ConfigError(f"entry point {point.name} is not a Compressor")
        if found.setdefault(loaded.name, loaded) is not loaded:
            raise ConfigError(f"two compressors are named {loaded.name!r}")
    return found


def from_string(text: str) -> Compressor:
    """Parse a string form. ConfigError says what is wrong, what exists, and what was probably meant."""
    try:
        return _parse(text, None)
    except ConfigError as error:
        raise hinted(error, _hint(text)) from error.__cause__


def _hint(text: str) -> str:
    name = head_of(text)
    if name in _SHORT:
        return ""  # the error says how to write it
    meant = closest(name, [*registered(), *_SHORT, *OF_CONTROLLERS])
    if meant in OF_CONTROLLERS:
        return f" ({meant} is a controller: {OF_CONTROLLERS[meant]})"
    forms = {name: Form.of(kind, kind.level_field) for name, kind in registered().items()}
    forms |= {short: Form({}, None, wraps=False) for short in _SHORT}
    return hint(text, forms, lambda one: _parse(one, None), "quantize:bits=4")


def _parse(text: str, level: Level) -> Compressor:
    """With a level, unless that is None, in place of the one that the text names or leaves out."""
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
            f"{text!r}: {name} wraps another compressor"
            if inner is None
            else f"{text!r}: {name} wraps nothing"
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


# Plans name a few compressors many times. Of 4 and 4.0 one may be impossible: hence typed.
@lru_cache(maxsize=4096, typed=True)
def at_level(family: str, level: Level) -> Compressor:
    """The compressor that a plan's assignment means."""
    # Not with_level: the level that a compressor has by default may be one that it refuses beside the other fields.
    return _parse(family, level)
