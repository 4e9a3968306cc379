"""Compressions by their string form, resolved when a row is run: one that does not exist costs its own row only."""

from __future__ import annotations


def why_not(compression: str) -> str | None:
    """Why there is no such compression; None if there is."""
    from gradcomp.compress.registry import from_string
    from gradcomp.core.errors import ConfigError

    try:
        from_string(compression)
    except ConfigError as error:
        return str(error)
    return None
