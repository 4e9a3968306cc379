"""The instruction set that the compiled kernels use, for the time of a test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def instruction_set(name: str) -> Iterator[None]:
    """Whatever leaves the block, be it Hypothesis out of data, leaves the instruction set as it was."""
    extension = pytest.importorskip("gradcomp._native")
    before = extension.isa()
    extension.set_isa(name)
    try:
        yield
    finally:
        extension.set_isa(before)
