"""The compiled kernels and their instruction sets; where they are not built, whoever uses them is skipped."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from gradcomp.kernels import dispatch

COMPILED = "native" in dispatch._backends


class _Absent:
    """Stands for the compiled kernels in parameters of tests."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        pytest.skip("needs the compiled module")


NATIVE: Any = dispatch.named("native") if COMPILED else _Absent()


def available_isas() -> list[str]:
    """The instruction sets that tests run with; none without the compiled module."""
    if not COMPILED:
        return []
    from gradcomp import _native

    return list(_native.available_isas())


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
