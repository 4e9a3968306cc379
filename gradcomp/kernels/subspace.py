"""A step of subspace iteration for all layers of a table, in three calls: one wait each where layers are on a GPU.

Some layers are approximated, see :mod:`gradcomp.kernels.lowrank`; the others travel exactly beside them, in float32. A
message holds the factors P of the former, then the latter, or the factors Q.

    project    M <- factor g + decay e;  message <- M Q, the exact layers     before the first sum
    iterate    exact layers <- their mean;  P <- orthonormal P;  Q <- M^T P    between the two
    finish     M <- M - P Q^T of this rank;  mean <- P Q^T;  keep Q            after the second

Flags are uint8, one for each row of the table; they are ORed into. Rows' payloads begin where :attr:`Layers.exact_at`
says; approximated layers have none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gradcomp import kernels
from gradcomp.kernels import bodies, lowrank
from gradcomp.kernels.cuda.mirrors import fill
from gradcomp.kernels.segments import FP32, Bytes, SegmentTable

Floats = npt.NDArray[np.float32]
Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Layers:
    """What stays from step to step of a table whose rows keep all but their addresses.

    ``low``, ``exact``: rows of the table. ``rows``, ``columns``, ``ranks``: n, m and r of the ``low`` ones; their
    factors P (r x n) and Q (r x m) begin at ``p_at`` and ``q_at`` of flat arrays of ``p_size`` and ``q_size``. The
    ``exact`` ones have ``exact_lengths`` elements, ``exact_size`` in all, and begin at the bytes ``exact_at`` of the
    first message. A device keeps its calls by the object, whose arrays nobody may change.
    """

    low: Int64s
    exact: Int64s
    rows: Int64s
    columns: Int64s
    ranks: Int64s
    p_at: Int64s
    q_at: Int64s
    p_size: int
    q_size: int
    exact_size: int
    exact_at: Int64s
    exact_lengths: Int64s

    @property
    def shape(self) -> tuple[Int64s, Int64s, Int64s]:
        """n, m, r: what every kernel asks for."""
        return self.rows, self.columns, self.ranks

    def place(self, *tables: SegmentTable) -> None:
        """Tell tables where the exact layers are in the first message."""
        for table in tables:
            table["payload"][self.exact] = self.exact_at

    def spoil(self, exact: Floats, flags: Bytes) -> None:
        """NaN in ``exact``, the exact layers' part of a message, where flags are set, and so in all ranks' sum."""
        for row in np.flatnonzero(flags[self.exact]).tolist():
            start = int(self.exact_at[row]) // 4 - self.p_size
            fill(exact[start : start + int(self.exact_lengths[row])], np.nan)


@dataclass(frozen=True, eq=False)
class Kept:
    """Where factors are kept for the next step: each begins at ``before``, and at ``after`` from now on."""

    memory: Floats
    before: Int64s
    after: Int64s


def project(
    layers: Layers,
    table: SegmentTable,
    flags: Bytes,
    factors: Floats,
    q: Floats,
    q_at: Int64s,
    message: Floats,
    *,
    scale: float,
    decay: float,
) -> None:
    """Fill the first message; NaN for a layer that is not finite.

    Args:
        layers: what stays.
        table: reads gradients and residuals, writes next residuals.
        flags: ORed into.
        factors: float32, one per row; factor of the gradient.
        q: float32; read.
        q_at: int64, where in it each Q begins.
        message: float32; written.
        scale: the factor once more, for the exact layers.
        decay: factor of the residuals.
    """
    device = bodies.of(table)
    if device is not None:
        device.subspace_project(layers, table, flags, factors, q, q_at, message, scale=scale, decay=decay)
        if flags.any():
            layers.spoil(message[layers.p_size :], flags)
        return
    low, exact = layers.low, layers.exact
    found = np.zeros(len(low), dtype=np.uint8)
    lowrank.project(
        table[low], found, factors[low], *layers.shape, q, q_at, message, layers.p_at, decay=decay
    )
    flags[low] |= found
    if len(exact):
        found = np.zeros(len(exact), dtype=np.uint8)
        kernels.encode(
            *(FP32, table[exact], message.view(np.uint8), found),
            stochastic=False,
            seed=0,
            step=0,
            rank=0,
            scale=scale,
            decay=decay,
        )
        flags[exact] |= found
        layers.spoil(message[layers.p_size :], flags)


def iterate(
    layers: Layers,
    table: SegmentTable,
    outputs: SegmentTable,
    flags: Bytes,
    total: Floats,
    message: Floats,
    own: Floats,
    *,
    divisor: float,
    scale: float,
) -> None:
    """From the sum of the first message to the second.

    Args:
        layers: what stays.
        table: reads next residuals.
        outputs: writes outputs of the exact layers; read where flags are set, NaN then.
        flags: read, and ORed into.
        total: float32; the sum; its P becomes orthonormal.
        message: float32; written.
        own: float32; written as ``message``, which the sum over ranks will replace.
        divisor: number of ranks, or 1 for sums.
        scale: factor of the means.
    """
    device = bodies.of(table)
    if device is not None:
        device.subspace_iterate(
            *(layers, table, outputs, flags, total, message, own), divisor=divisor, scale=scale
        )
        return
    low, exact = layers.low, layers.exact
    if len(exact):
        found = flags[exact]
        kernels.decode(FP32, outputs[exact], total.view(np.uint8), found, divisor=divisor, scale=scale)
        flags[exact] |= found
    # A sum of M Q is the mean but for a factor, which the basis does not know.
    lowrank.orthogonalise(layers.rows, layers.ranks, total, layers.p_at)
    lowrank.back_project(table[low], *layers.shape, total, layers.p_at, message, layers.q_at)
    own[:] = message


def finish(
    layers: Layers,
    table: SegmentTable,
    outputs: SegmentTable,
    flags: Bytes,
    p: Floats,
    own: Floats,
    q: Floats,
    kept: Kept | None,
    *,
    feedback: bool,
    divisor: float,
    scale: float,
) -> None:
    """From the sum of the second message to means, residuals and the next step's Q.

    Args:
        layers: what stays.
        table: reads and, with ``feedback``, writes next residuals.
        outputs: writes outputs of the approximated layers; NaN where flags are set.
        flags: read, and ORed into.
        p: float32; orthonormal.
        own: float32; this rank's Q.
        q: float32; the sum over ranks.
        kept: where Q is kept; None: nowhere.
        feedback: whether the next residual is a residual.
        divisor: number of ranks, or 1 for sums.
        scale: factor of the means.
    """
    device = bodies.of(table)
    if device is not None:
        device.subspace_finish(
            *(layers, table, outputs, flags, p, own, q, kept),
            feedback=feedback,
            divisor=divisor,
            scale=scale,
        )
        return
    low, p_at, q_at = layers.low, layers.p_at, layers.q_at
    if feedback:
        lowrank.subtract(table[low], *layers.shape, p, p_at, own, q_at)
    found = flags[low]
    lowrank.expand(outputs[low], found, *layers.shape, p, p_at, q, q_at, divisor=divisor, scale=scale)
    flags[low] |= found
    if kept is not None:
        places: Any = kept.memory, kept.before, kept.after
        lowrank.keep(layers.columns, layers.ranks, q, q_at, *places, beside=table)
