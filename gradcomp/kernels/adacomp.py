"""AdaComp's selection: the typed way to the kernel that `reference_adacomp` defines."""

from __future__ import annotations

from gradcomp.kernels import bodies
from gradcomp.kernels.reference_selection import Floats, Indices, Numbers
from gradcomp.kernels.segments import SegmentTable

__all__ = ["select_adacomp"]


def select_adacomp(
    table: SegmentTable,
    factors: Floats,
    limits: Numbers,
    offsets: Numbers,
    indices: Indices,
    values: Floats,
    found: Numbers,
    *,
    bin_size: int,
) -> None:
    """Select what another gradient would make the largest of its bin; see `reference_adacomp.select_adacomp`."""
    bodies.active().select_adacomp(table, factors, limits, offsets, indices, values, found, bin_size=bin_size)
