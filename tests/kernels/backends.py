"""The backends that tests run with: NumPy's, the compiled one with each instruction set, CUDA's stand-in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from kernels.isas import NATIVE, available_isas, instruction_set
from kernels.standin import ORDERS, cuda_backend

from gradcomp.kernels import dispatch

REFERENCE: Any = dispatch.named("reference")
HOST = ("reference", "native")
ALL = (*HOST, *ORDERS)
COMPILED = (*available_isas(), *ORDERS)
"""All but the reference, the native one once for each instruction set."""


@contextmanager
def running(name: str) -> Iterator[Any]:
    """The kernels of a backend, by its name, or of the native one with the instruction set of that name."""
    if name in ORDERS:
        yield cuda_backend(ORDERS[name])
    elif name == "native":
        yield NATIVE
    elif name == "reference":
        with dispatch.use("reference"):
            yield REFERENCE
    else:
        with instruction_set(name):
            yield NATIVE


def each_of(names: Sequence[str]) -> Any:
    """Runs a test with each of these backends, its argument `backend`."""
    return pytest.mark.parametrize("backend", names, indirect=True)
