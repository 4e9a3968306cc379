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


def has_momentum(compression: str) -> bool:
    """Whether it accumulates gradients itself, so that the optimizer must not; false if there is none."""
    from gradcomp.compress.registry import from_string

    return why_not(compression) is None and bool(from_string(compression).traits.momentum)
