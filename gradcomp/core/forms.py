"""Parses string forms of compressors and controllers, ``name[inner]:field=value,...``."""

from __future__ import annotations

from collections.abc import Callable, Collection
from inspect import Parameter, signature
from typing import Any, TypeVar

from gradcomp.core.errors import ConfigError

Made = TypeVar("Made")


def split(text: str) -> tuple[str, str | None, str]:
    """Splits ``name[inner]:fields`` into its parts; inner is None without brackets."""
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
                raise ConfigError(f"{text!r}: expected ':' after ']', got {after!r}")
            return name, rest[:at], after[1:]
    raise ConfigError(f"{text!r}: a bracket is not closed")


def outside_brackets(text: str, separator: str = ",") -> list[str]:
    """Splits the text at separators that are not inside brackets."""
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
    """Parses ``field=value,...`` into arguments; ``read(field, value)`` makes a value, ``text`` is for errors."""
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
    """Returns ``kind(**arguments)``; a ConfigError about ``text`` names the required fields that are missing."""
    needed = [name for name, one in signature(kind).parameters.items() if one.default is Parameter.empty]
    if missing := [name for name in needed if name not in arguments]:
        raise ConfigError(f"{text!r} lacks {', '.join(missing)}")
    return kind(**arguments)


def value_of(text: str, nested: Callable[[str], Any]) -> Any:
    """Parses a number, a word, ``true``, ``none``, ``a/b`` as a tuple, or in brackets what ``nested`` parses."""
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
