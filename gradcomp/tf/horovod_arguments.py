"""Arguments of Horovod's wrappers that are taken, looked at, and change nothing."""

from __future__ import annotations

from typing import Any

from gradcomp.compress import Compressor, Policy
from gradcomp.compress.registry import from_string
from gradcomp.core.errors import ConfigError


def check_ignored(num_groups: Any, groups: Any, **words: Any) -> None:
    """ConfigError for what Horovod would not take either.

    ``groups`` says what travels together, and no value depends on it: buckets form by themselves. ``words``: the name
    of operations, which have none here, and devices. A compression in their place is one that meant ``compression=``.
    """
    for key, word in words.items():
        if word is not None and (not isinstance(word, str) or _is_compression(word)):
            kind = "a compression" if isinstance(word, str | Policy | Compressor) else type(word).__name__
            raise ConfigError(f"{key} must be a string, got {kind}; write compression=..., by its keyword")
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
