"""Measures the errors of compressors on one layer, within a memory limit."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from gradcomp.control.base import Doubles
from gradcomp.core.errors import ConfigError
from gradcomp.core.layers import LayerSpec
from gradcomp.core.vectors import Floats, Vector
from gradcomp.kernels.codec import Table
from gradcomp.kernels.devices import HOST, Device
from gradcomp.kernels.segments import FLOAT32, SEGMENT


@dataclass(frozen=True)
class Budget:
    """A memory limit of ``nbytes`` besides the measured values; None for no limit. Messages begin with ``what``."""

    nbytes: int | None
    what: str

    def allows(self, nbytes: int) -> bool:
        """Returns true if ``nbytes`` are within the limit."""
        return self.nbytes is None or nbytes <= self.nbytes

    def require(self, nbytes: int) -> None:
        """Raises ConfigError, with the bytes that are needed, if ``nbytes`` are not within the limit."""
        if not self.allows(nbytes):
            raise ConfigError(
                f"{self.what} takes {nbytes:,} bytes in addition to the values, memory_bytes allows {self.nbytes:,}; "
                "allow more, or leave these choices out"
            )

    def first_or_least(self, first: int, second: int) -> int:
        """Returns the bytes of the first of two ways if the limit allows it, else of the one that takes less."""
        if self.allows(first):
            return first
        self.require(min(first, second))
        return min(first, second)


@dataclass(frozen=True, eq=False)
class Subject:
    """The layer that is measured, and ``flat``, its values in memory of ``device``."""

    layer: LayerSpec
    flat: Vector
    seed: int
    budget: Budget
    device: Device = HOST

    @cached_property
    def values(self) -> Floats:
        """Returns the values in host memory, whose kernels measure most families."""
        return self.flat.read()


def segment(address: int, size: int) -> Table:
    """Returns a table of one row: ``size`` float32 at ``address``."""
    table = np.zeros(1, dtype=SEGMENT)
    table["gradient"], table["length"], table["dtype"] = address, size, FLOAT32
    return table


def energies(table: Table, device: Device = HOST) -> Doubles:
    """Returns each row's sum of squares in float64, which is finite if all of its values are."""
    found = np.zeros(len(table))
    device.kernels.squares(table, found)
    return found
