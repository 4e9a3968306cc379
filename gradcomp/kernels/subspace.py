"""A step of subspace iteration for all layers of a table, in three calls: one wait each where layers are on a GPU.

Some layers are approximated, see :mod:`gradcomp.kernels.reference_lowrank`; the others travel exactly, in float32, in
the same messages. A message holds either the factors P of the former, then the latter, or the factors Q.

    project    M <- factor g + decay e;  message <- M Q, the exact layers     before the first sum
    iterate    exact layers <- their mean;  P <- orthonormal P;  Q <- M^T P    between the two
    finish     M <- M - P Q^T of this rank;  mean <- P Q^T;  keep Q            after the second

Flags are uint8, one for each row of the tables; they are ORed into. Rows' payloads begin at :attr:`Layers.exact_at`;
approximated layers have none. The functions are methods of :class:`gradcomp.kernels.dispatch.Kernels`; a GPU has one
kernel for each.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from gradcomp.kernels.cuda.mirrors import fill
from gradcomp.kernels.segments import FP32, Bytes, Factor, Floats, SegmentTable, Shapes, Sizes

if TYPE_CHECKING:
    from gradcomp.kernels.dispatch import Kernels


@dataclass(frozen=True, eq=False)
class Layers:
    """The constant part of tables whose rows keep everything but their addresses from step to step.

    ``inputs``: the table whose gradients and residuals are read and whose next residuals are written; ``outputs``: the
    one for means. ``low``, ``exact``: rows of both. ``rows``, ``columns``, ``ranks``: n, m and r of the ``low`` ones;
    their factors P (r x n) and Q (r x m) begin at ``p_at`` and ``q_at`` of flat arrays of ``p_size`` and ``q_size``.
    The ``exact`` ones have ``exact_lengths`` elements, ``exact_size`` in all, and begin at the bytes ``exact_at`` of
    the first message. A device finds its prepared calls by this object, so its arrays must not be changed.
    """

    inputs: SegmentTable
    outputs: SegmentTable
    low: Sizes
    exact: Sizes
    rows: Sizes
    columns: Sizes
    ranks: Sizes
    p_at: Sizes
    q_at: Sizes
    p_size: int
    q_size: int
    exact_size: int
    exact_at: Sizes
    exact_lengths: Sizes

    @cached_property
    def shapes(self) -> Shapes:
        """Returns n, m and r of the approximated layers."""
        return Shapes(self.rows, self.columns, self.ranks)

    def p(self, values: Floats) -> Factor:
        """Returns the factor P of the approximated layers in a flat array."""
        return Factor(values, self.p_at)

    def q(self, values: Floats) -> Factor:
        """Returns the factor Q of the approximated layers in a flat array."""
        return Factor(values, self.q_at)

    def place(self) -> None:
        """Enters the places of the exact layers in the first message into the tables."""
        for table in (self.inputs, self.outputs):
            table["payload"][self.exact] = self.exact_at

    def spoil(self, exact: Floats, flags: Bytes) -> None:
        """Fills flagged layers of ``exact``, the exact layers' part of a message, with NaN, for all ranks' sum."""
        if not np.count_nonzero(flags):
            return
        for row in np.flatnonzero(flags[self.exact]).tolist():
            start = int(self.exact_at[row]) // 4 - self.p_size
            fill(exact[start : start + int(self.exact_lengths[row])], np.nan)


@dataclass(frozen=True, eq=False)
class Kept:
    """The storage of factors between steps: each begins at ``before``, and at ``after`` from this step on."""

    memory: Floats
    before: Sizes
    after: Sizes


def project(
    on: Kernels,
    layers: Layers,
    flags: Bytes,
    factors: Floats,
    q: Factor,
    message: Floats,
    *,
    scale: float,
    decay: float,
) -> None:
    """Fills the first message, with NaN for a layer that is not finite.

    Args:
        on: the backend that runs the parts.
        layers: reads gradients and residuals, writes next residuals.
        flags: ORed into.
        factors: float32, one per row; factor of the gradient.
        q: read.
        message: float32; written.
        scale: the same factor of the gradient, for the exact layers.
        decay: factor of the residuals.
    """
    table, low, exact = layers.inputs, layers.low, layers.exact
    found = np.zeros(len(low), dtype=np.uint8)
    on.project(table[low], found, factors[low], layers.shapes, q, layers.p(message), decay=decay)
    flags[low] |= found
    if len(exact):
        found = np.zeros(len(exact), dtype=np.uint8)
        on.encode(FP32, table[exact], message.view(np.uint8), found, draw=None, scale=scale, decay=decay)
        flags[exact] |= found
        layers.spoil(message[layers.p_size :], flags)


def iterate(
    on: Kernels,
    layers: Layers,
    flags: Bytes,
    total: Floats,
    message: Floats,
    own: Floats,
    *,
    divisor: float,
    scale: float,
) -> None:
    """Makes the second message from the sum of the first one over ranks.

    Args:
        on: the backend that runs the parts.
        layers: reads next residuals; writes outputs of the exact layers, NaN where flags are set.
        flags: read, and ORed into.
        total: float32; the sum; its P becomes orthonormal.
        message: float32; written.
        own: float32; a copy of ``message``, which the sum over ranks will replace.
        divisor: number of ranks, or 1 for sums.
        scale: factor of the means.
    """
    low, exact = layers.low, layers.exact
    if len(exact):
        found = flags[exact]
        on.decode(FP32, layers.outputs[exact], total.view(np.uint8), found, divisor=divisor, scale=scale)
        flags[exact] |= found
    # The sum of M Q is a multiple of the mean, and both have the same orthonormal basis.
    on.orthogonalise(layers.rows, layers.ranks, layers.p(total))
    on.back_project(layers.inputs[low], layers.shapes, layers.p(total), layers.q(message))
    own[:] = message


def finish(
    on: Kernels,
    layers: Layers,
    flags: Bytes,
    p: Floats,
    own: Floats | None,
    q: Floats,
    kept: Kept | None,
    *,
    divisor: float,
    scale: float,
) -> None:
    """Computes means, residuals and the next step's Q from the sum of the second message over ranks.

    Args:
        on: the backend that runs the parts.
        layers: reads and, with ``own``, writes next residuals; writes outputs of the approximated layers, NaN where
            flags are set.
        flags: read, and ORed into.
        p: float32; orthonormal.
        own: float32; this rank's Q, whose product with P is subtracted from the next residual; None: there are no
            next residuals.
        q: float32; the sum over ranks.
        kept: storage of Q; None: Q is not stored.
        divisor: number of ranks, or 1 for sums.
        scale: factor of the means.
    """
    low, table = layers.low, layers.inputs
    if own is not None:
        on.subtract(table[low], layers.shapes, layers.p(p), layers.q(own))
    found = flags[low]
    factors = layers.p(p), layers.q(q)
    on.expand(layers.outputs[low], found, layers.shapes, *factors, divisor=divisor, scale=scale)
    flags[low] |= found
    if kept is not None:
        places: Any = kept.memory, kept.before, kept.after
        on.keep(layers.columns, layers.ranks, layers.q(q), *places)
