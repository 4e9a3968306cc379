"""String forms, ``name[inner]:field=value,...``: what compressors and controllers are written as."""

from __future__ import annotations

from collections.abc import Callable, Collection
from inspect import Parameter, signature
from typing import Any, TypeVar

from gradcomp.core.errors import ConfigError

Made = TypeVar("Made")


def split(text: str) -> tuple[str, str | None, str]:
    """``name[inner]:fields`` -> its parts; without brackets there is no inner one."""
    name, bracket, rest = text.partition("[")
    if not bracket or ":" in name:
        name, _, rest = text.partition(":")
        return name, None, rest
    depth = 1
    for at, character in enumerate(rest):
        depth += (character == "[") - (character == "]")
        if depth == 0:
            after = rest[at + 1 :]
            if after and not after.startswith(":"):
                raise ConfigError(f"{text!r}: expected ':' behind ']', got {after!r}")
            return name, rest[:at], after[1:]
    raise ConfigError(f"{text!r}: a bracket is not closed")


def outside_brackets(text: str, separator: str = ",") -> list[str]:
    """The parts between those separators that no bracket encloses."""
    parts, depth = [""], 0
    for character in text:
        depth += (character == "[") - (character == "]")
        if character == separator and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def arguments_of(
    text: str, rest: str, fields: Collection[str], read: Callable[[str, str], Any]
) -> dict[str, Any]:
    """``field=value,...`` behind a name as arguments; ``read(field, value)`` makes a value. ``text``: for errors."""
    arguments: dict[str, Any] = {}
    for item in filter(None, outside_brackets(rest)):
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals or key not in fields:
            known = f"one of {', '.join(sorted(fields))}" if fields else "of none: it has no fields"
            raise ConfigError(f"{text!r}: expected field=value with field {known}")
        if key in arguments:
            raise ConfigError(f"{text!r}: {key} is given twice")
        arguments[key] = read(key, value)
    return arguments


def build(kind: Callable[..., Made], text: str, arguments: dict[str, Any]) -> Made:
    """``kind(**arguments)``; ConfigError that names the fields without which there is none. ``text``: for errors."""
    needed = [name for name, one in signature(kind).parameters.items() if one.default is Parameter.empty]
    if missing := [name for name in needed if name not in arguments]:
        raise ConfigError(f"{text!r} lacks {', '.join(missing)}")
    return kind(**arguments)


def value_of(text: str, nested: Callable[[str], Any]) -> Any:
    """A number, a word, ``true``, ``none``, ``a/b`` for a tuple, or in brackets what ``nested`` reads."""
    parts = outside_brackets(text, "/")
    if len(parts) > 1:
        return tuple(value_of(part, nested) for part in parts if part)
    if text.startswith("[") and text.endswith("]"):
        return nested(text[1:-1])
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
