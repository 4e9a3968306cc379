"""Random indices: the typed way to the kernel that `reference_draws` defines."""

from __future__ import annotations

from gradcomp.kernels import bodies
from gradcomp.kernels.reference_draws import MAX_DRAWN_FROM, Indices, Sizes, strata

__all__ = ["MAX_DRAWN_FROM", "draw_indices", "strata"]


def draw_indices(
    lengths: Sizes,
    counts: Sizes,
    layers: Indices,
    offsets: Sizes,
    indices: Indices,
    *,
    seed: int,
    step: int,
    rank: int,
) -> None:
    """Draw counts[i] ascending indices below lengths[i]; see `reference_draws.draw_indices`."""
    bodies.active().draw_indices(lengths, counts, layers, offsets, indices, seed=seed, step=step, rank=rank)
