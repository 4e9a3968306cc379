"""Low-rank approximation of layers: the kernels of PowerSGD and its relatives.

Row i of a table is a whole layer, seen as the matrix M_i with n_i rows and m_i columns, row-major: n_i m_i is the
row's length. Its factors P_i (n_i x r_i) and Q_i (m_i x r_i) lie *column by column*, each column contiguous, in
the flat float32 arrays `p` and `q`, from the elements p_at[i] and q_at[i] on. `rows` (n), `columns` (m), `ranks`
(r), `p_at` and `q_at` are int64 vectors with an item per row of the table.

Source: Vogels et al. 2019, Algorithm 1. One step of one layer, with means over ranks by the caller:

    project         P <- M Q               line 3     any order of sums
    orthogonalise   P <- orthonormal P     line 5     the same bytes from every body
    back_project    Q <- M^T P             line 6     any order of sums
    expand          output <- P Q^T        line 11    the same bytes from every body
    subtract        M <- M - P Q^T         Algorithm 2, line 8, with this rank's own Q    the same bytes
    keep            Q of the next step <- Q                         the same bytes

The calls put nothing on the wire and keep no state: M lives in the rows' next residuals, which hold the new residual
in the end. Each call raises TypeError for an array that is not a contiguous vector of its dtype, and ValueError for a
row whose numbers do not fit together, that is float64, or whose factors do not lie inside `p` and `q`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from gradcomp.kernels import bodies, philox
from gradcomp.kernels.segments import OWNER_RANK, Bytes, SegmentTable

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Int64s = npt.NDArray[np.int64]

FIRST_STEP = 0xFFFFFFFF
"""The step in the random counter of a layer's first Q, which belongs to no step."""

BASELINE_RANKS = 4
"""Beyond this rank, NumPy multiplies faster than the compiled kernels do without AVX."""


def project(
    table: SegmentTable,
    flags: Bytes,
    factors: Floats,
    rows: Int64s,
    columns: Int64s,
    ranks: Int64s,
    q: Floats,
    q_at: Int64s,
    p: Floats,
    p_at: Int64s,
    *,
    decay: float,
) -> None:
    """next residual <- M = factor * gradient + decay * residual, and P <- M Q.

    A layer with a non-finite element of M gets its flag set and a P of NaN; its next residual is unspecified then.

    Args:
        table: SEGMENT rows; reads gradient (0: absent, zero), residual (0: none); writes next residual.
        flags: uint8, one per row; only ORed into.
        factors: float32, one per row; factor of the gradient.
        rows: int64, n of each row.
        columns: int64, m of each row.
        ranks: int64, r of each row.
        q: float32; read.
        q_at: int64, where each Q begins.
        p: float32; written.
        p_at: int64, where each P begins.
        decay: factor of the residual.
    """
    (bodies.of(table) or _multiplier(ranks)).project(
        table, flags, factors, rows, columns, ranks, q, q_at, p, p_at, decay=decay
    )


def back_project(
    table: SegmentTable,
    rows: Int64s,
    columns: Int64s,
    ranks: Int64s,
    p: Floats,
    p_at: Int64s,
    q: Floats,
    q_at: Int64s,
) -> None:
    """Q <- M^T P, with M in the next residual.

    Args:
        table: SEGMENT rows; reads next residual.
        rows: int64, n of each row.
        columns: int64, m of each row.
        ranks: int64, r of each row.
        p: float32; read.
        p_at: int64, where each P begins.
        q: float32; written.
        q_at: int64, where each Q begins.
    """
    (bodies.of(table) or _multiplier(ranks)).back_project(table, rows, columns, ranks, p, p_at, q, q_at)


def orthogonalise(
    rows: Int64s, ranks: Int64s, p: Floats, p_at: Int64s, *, beside: SegmentTable | None = None
) -> None:
    """Make the columns of each P orthonormal, in place, or zero where they depend on those before them.

    For each column x, from the first to the last:

        x <- 2^e x, so that its largest magnitude is in [1, 2)
        twice, for each column u before: x <- x - (u . x) u
        x <- x / |x| if |x| > 2^-20 of what it was before the subtractions, else 0

    Scalar products are float64, in the order of `reference_sums`; vectors are float32. The columns that are not zero
    satisfy |P^T P - I| < 1e-6, nearly dependent ones included. A P that is not finite becomes NaN.

    Source: Vogels et al. 2019, Algorithm 1, line 5 (modified Gram-Schmidt). We differ in the scaling, so that no
    magnitude under- or overflows; in the second pass, without which nearly dependent columns are far from orthogonal;
    and in the zeros, where dividing by a norm of rounding errors, or of nothing, would put noise or NaN: P P^T is an
    orthogonal projection all the same, and a layer of zeros gets a mean of exactly zero.

    Args:
        rows: int64, n of each layer.
        ranks: int64, r of each layer.
        p: float32; read and written.
        p_at: int64, where each P begins.
        beside: the layers; it runs where they are, with the same bytes.
    """
    body = (bodies.of(beside) if beside is not None else None) or bodies.active()
    body.orthogonalise(rows, ranks, p, p_at)


def expand(
    table: SegmentTable,
    flags: Bytes,
    rows: Int64s,
    columns: Int64s,
    ranks: Int64s,
    p: Floats,
    p_at: Int64s,
    q: Floats,
    q_at: Int64s,
    *,
    divisor: float,
    scale: float,
) -> None:
    """output <- scale * ((P Q^T) / divisor), rounded to the row's dtype.

    (P Q^T)[a, b] = ((P[a, 0] Q[b, 0]) + P[a, 1] Q[b, 1]) + ..., each product and sum rounded to float32. A layer whose
    flag is set on entry is filled with NaN; one with a non-finite output gets its flag set. Rows without an output
    are skipped, unchecked.

    Args:
        table: SEGMENT rows; writes output.
        flags: uint8, one per row; read, and ORed into.
        rows: int64, n of each row.
        columns: int64, m of each row.
        ranks: int64, r of each row.
        p: float32; read.
        p_at: int64, where each P begins.
        q: float32; read.
        q_at: int64, where each Q begins.
        divisor: number of ranks, or 1 for factors that are means already.
        scale: factor of the result.
    """
    _body(table).expand(table, flags, rows, columns, ranks, p, p_at, q, q_at, divisor=divisor, scale=scale)


def subtract(
    table: SegmentTable,
    rows: Int64s,
    columns: Int64s,
    ranks: Int64s,
    p: Floats,
    p_at: Int64s,
    q: Floats,
    q_at: Int64s,
) -> None:
    """next residual <- next residual - P Q^T, the product as in `expand`.

    Args:
        table: SEGMENT rows; reads and writes next residual.
        rows: int64, n of each row.
        columns: int64, m of each row.
        ranks: int64, r of each row.
        p: float32; read.
        p_at: int64, where each P begins.
        q: float32; read.
        q_at: int64, where each Q begins.
    """
    _body(table).subtract(table, rows, columns, ranks, p, p_at, q, q_at)


def keep(
    sides: Int64s,
    ranks: Int64s,
    factor: Floats,
    at: Int64s,
    kept: Floats,
    before: Int64s,
    after: Int64s,
    *,
    beside: SegmentTable,
) -> None:
    """Keep each factor, column by column, for another step.

    For each column x of a factor, and the one y that was kept before: y <- y if x is zero, else x scaled by the power
    of two that brings its largest magnitude into [1/2, 1). What is not finite stays as it is.

    Args:
        sides: int64, elements of a column of each layer.
        ranks: int64, r of each layer.
        factor: float32; read.
        at: int64, where each factor begins.
        kept: float32; read and written.
        before: int64, where what was kept of each begins.
        after: int64, where what is kept now begins: nowhere where something is read.
        beside: the layers; it runs where they are, with the same bytes.
    """
    body = bodies.of(beside) or bodies.named("reference")
    body.keep(sides, ranks, factor, at, kept, before, after)


def numpy_multiplies(rank: int) -> bool:
    """Whether sums in any order are NumPy's on the host: with many columns it beats vectors of 128 bits.

    Their order, and so their last bits, depend on where matrices lie then; and :func:`project` takes 5 bytes for an
    element of the longest layer.
    """
    native = bodies.body() == "native"
    return not native or (rank > BASELINE_RANKS and bodies.named("native").isa() == "baseline")


def _multiplier(ranks: Int64s) -> bodies.Body:
    """The host's body for sums in any order."""
    name = "reference" if numpy_multiplies(int(np.max(ranks, initial=0))) else bodies.body()
    return bodies.named(name)


def _body(table: SegmentTable) -> Any:
    """The device's where the table is, or the host's."""
    return bodies.of(table) or bodies.named(bodies.body())


# --- random factors -----------------------------------------------------------------------------------------


def initial_q(columns: int, rank: int, *, seed: int, layer: int) -> Floats:
    """The Q that a layer begins with: i.i.d. standard normal numbers (Vogels et al. 2019, Algorithm 1, line 1).

    Args:
        columns: m.
        rank: r; a larger one only adds columns to the Q of a smaller one.
        seed: 64 bits, the key of the random stream.
        layer: 32 bits, the layer's hash, a word of the random counter.

    Returns:
        float32, shape (rank, columns): Q column by column.
    """
    return random_q(columns, rank, seed=seed, layer=layer, step=FIRST_STEP)


def random_q(columns: int, rank: int, *, seed: int, layer: int, step: int) -> Floats:
    """The Q of one step, equal on all ranks: i.i.d. standard normal numbers (Vogels et al. 2019, section 4.1).

    Number k * columns + j is Q[j, k]. Numbers 2 i and 2 i + 1 are made of words 0, 1 and 2, 3 of the counter
    (2**32 - 1 - i, layer, step, OWNER_RANK); draws for the elements of the layer count up from 0. Box and
    Muller's sqrt(-2 ln u) cos(2 pi v) is evaluated in float64 by fixed polynomials: logarithm and cosine of
    mathematical libraries differ in their last bits from machine to machine.

    Args:
        columns: m.
        rank: r; as in `initial_q`.
        seed: 64 bits, the key of the random stream.
        layer: 32 bits, the layer's hash, a word of the random counter.
        step: 32 bits, a word of the random counter.

    Returns:
        float32, shape (rank, columns): Q column by column, not scaled.
    """
    one = np.array([columns]), np.array([rank]), np.array([layer], np.uint32)
    return random_factors(*one, seed=seed, step=step).reshape(rank, columns)


def random_factors(
    columns: Int64s, ranks: Int64s, layers: npt.NDArray[np.uint32], *, seed: int, step: int
) -> Floats:
    """The Q of one step of every layer, one behind the other; see `random_q`.

    Args:
        columns: int64, m of each layer.
        ranks: int64, r of each layer.
        layers: uint32, the layers' hashes.
        seed: as in `random_q`.
        step: as in `random_q`.

    Returns:
        float32, sum of r m numbers.
    """
    counts = ranks * columns
    blocks = (counts + 1) // 2
    ends = np.cumsum(blocks)
    within = np.arange(blocks.sum()) - np.repeat(ends - blocks, blocks)
    counter = np.empty((len(within), 4), np.uint32)
    counter[:, 0] = 0xFFFFFFFF - within
    counter[:, 1] = np.repeat(layers, blocks)
    counter[:, 2:] = step, OWNER_RANK
    words = philox.philox4x32(counter, (seed & 0xFFFFFFFF, seed >> 32)).reshape(-1, 2)
    u, v = ((words.astype(np.float64) + 0.5) * 2.0**-32).T
    normal: Floats = (np.sqrt(-2.0 * _log(u)) * _cos_turns(v)).astype(np.float32)
    kept = np.ones(len(normal), dtype=np.bool_)
    kept[(2 * ends - 1)[counts % 2 == 1]] = False  # the second of a pair that is not asked for
    return normal[kept]


def _log(x: Doubles) -> Doubles:
    """ln x for positive x, to 1e-10: x = 2^e y with y about 1, and ln y = 2 artanh((y - 1) / (y + 1))."""
    y, e = np.frexp(x)
    small = y < 0.7071067811865476
    y, e = np.where(small, 2.0 * y, y), np.where(small, e - 1, e)
    s = (y - 1.0) / (y + 1.0)
    return e * 0.6931471805599453 + 2.0 * s * _polynomial(s * s, [1.0 / (2 * i + 1) for i in range(7)])


def _cos_turns(x: Doubles) -> Doubles:
    """cos(2 pi x) for x in 0..1, to 1e-9: the sine of an angle within a quarter turn."""
    y = 6.283185307179586 * (np.abs(x - 0.5) - 0.25)
    coefficients = [1.0]
    for i in range(1, 8):
        coefficients.append(-coefficients[-1] / (2 * i * (2 * i + 1)))
    return y * _polynomial(y * y, coefficients)


def _polynomial(x: Doubles, coefficients: list[float]) -> Doubles:
    total = np.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        total = total * x + coefficient
    return total
