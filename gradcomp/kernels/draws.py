"""Random indices; `reference_draws` defines and documents the kernel."""

from __future__ import annotations

from gradcomp.kernels.bodies import kernel
from gradcomp.kernels.reference_draws import MAX_DRAWN_FROM, strata
from gradcomp.kernels.reference_draws import draw_indices as _definition

__all__ = ["MAX_DRAWN_FROM", "draw_indices", "strata"]

draw_indices = kernel(_definition)
