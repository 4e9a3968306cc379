"""Ranks that only serve: where there are some, and what does not work beside them."""

from __future__ import annotations

from gradcomp.core.errors import ConfigError
from gradcomp.core.scheme import parse


def serving(reduction: str, ranks: int) -> int:
    """How many of so many ranks only serve under this reduction. ConfigError where nobody would train."""
    return parse(reduction).serving(ranks)


def refuse_servers(reduction: str, ranks: int, what: str) -> None:
    """ConfigError if some of the ranks only serve."""
    if serving(reduction, ranks):
        raise ConfigError(f"{what} does not work with dedicated servers (reduction={reduction})")
