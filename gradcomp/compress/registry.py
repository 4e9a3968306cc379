"""String forms: ``"quantize:bits=4,bucket_size=512"`` <-> ``Quantize(bits=4, bucket_size=512)``.

Other packages may add compressors under the entry point group ``gradcomp.compressors``.
"""

from __future__ import annotations

import dataclasses
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from gradcomp.compress.base import Compressor
from gradcomp.compress.cast import Cast
from gradcomp.compress.identity import Identity
from gradcomp.compress.quantize import Quantize
from gradcomp.core.errors import ConfigError
from gradcomp.core.plan import Level

BUILT_IN: tuple[type[Compressor], ...] = (Identity, Cast, Quantize)

_SHORT = {"fp16": Cast("float16"), "bf16": Cast("bfloat16")}


@cache
def registered() -> dict[str, type[Compressor]]:
    """Every compressor by its name."""
    found = {c.name: c for c in BUILT_IN}
    for point in entry_points(group="gradcomp.compressors"):
        loaded = point.load()
        if not (isinstance(loaded, type) and issubclass(loaded, Compressor)):
            raise ConfigError(f"entry point {point.name} is not a Compressor")
        if loaded.name in found:
            raise ConfigError(f"two compressors are named {loaded.name!r}")
        found[loaded.name] = loaded
    return found


def from_string(text: str) -> Compressor:
    """Parse a string form. ConfigError says what is wrong and what exists."""
    name, _, rest = text.strip().partition(":")
    if name in _SHORT:
        if rest:
            raise ConfigError(f"{name} takes no fields; write {_SHORT[name].to_string()!r} and change that")
        return _SHORT[name]
    kind = registered().get(name)
    if kind is None:
        raise ConfigError(
            f"unknown compression {name!r}; known: {', '.join(sorted([*registered(), *_SHORT]))}"
        )
    fields = {f.name for f in dataclasses.fields(kind)}
    arguments: dict[str, Any] = {}
    for item in filter(None, rest.split(",")):
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals or key not in fields:
            raise ConfigError(f"{text!r}: expected field=value with field one of {', '.join(sorted(fields))}")
        if key in arguments:
            raise ConfigError(f"{text!r}: {key} is given twice")
        arguments[key] = _value(value)
    try:
        return kind(**arguments)
    except TypeError as error:
        raise ConfigError(f"{text!r}: {error}") from error


def at_level(family: str, level: Level) -> Compressor:
    """The compressor that a plan's assignment means."""
    compressor = from_string(family)
    if level is None:
        return compressor
    if compressor.level_field is None:
        raise ConfigError(f"{compressor.name} has no level, got {level!r}")
    return dataclasses.replace(compressor, **{compressor.level_field: level})


def _value(text: str) -> Any:
    lowered = text.lower()
    if lowered in ("true", "false"):
        return lowered == "true"
    if lowered == "none":
        return None
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
