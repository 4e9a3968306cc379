"""Checks arguments of Horovod's wrappers that are accepted and have no effect."""

from __future__ import annotations

from typing import Any

from gradcomp.compress import Compressor, Policy
from gradcomp.compress.registry import from_string
from gradcomp.core.errors import ConfigError


def check_ignored(num_groups: Any, groups: Any, **words: Any) -> None:
    """Raise ConfigError for values that Horovod would not accept either.

    ``groups`` tells what travels together there; here exchange buckets form by themselves, and no value
    depends on them. ``words`` are names of operations, which have none here, and devices. A compression in
    their place was meant as ``compression=``.
    """
    for key, word in words.items():
        if word is not None and (not isinstance(word, str) or _is_compression(word)):
            kind = "a compression" if isinstance(word, str | Policy | Compressor) else type(word).__name__
            raise ConfigError(
                f"{key} must be a string, got {kind}; pass a compression by its keyword, compression=..."
            )
    for key, number in (("num_groups", num_groups), ("groups", groups)):
        if number is None or (type(number) is int and number >= (key == "groups")):
            continue
        if key == "num_groups" or not isinstance(number, list):
            raise ConfigError(
                f"{key} must be a positive number or a list of lists of variables, got {number!r}"
            )


def _is_compression(name: str) -> bool:
    try:
        from_string(name)
    except ConfigError:
        return False
    return True
