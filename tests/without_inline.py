"""Collectives of their own for small arrays too, which else travel with the comparison of a call."""

from __future__ import annotations

from gradcomp.job import call_matching


def nothing_inline_among(size: int, this_size: int) -> None:
    """On every rank, before its first call: worlds of one size are tested without inline arrays, all others with."""
    if this_size == size:
        call_matching._MOST_INLINE_BYTES = 0
