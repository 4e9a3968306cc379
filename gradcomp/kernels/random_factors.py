"""Random factors of low-rank approximations, which are the same on every rank and machine."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gradcomp.kernels import philox
from gradcomp.kernels.segments import OWNER_RANK, Doubles, Floats, Sizes

FIRST_STEP = 0xFFFFFFFF
"""The step in the random counter of a layer's initial Q, which is drawn before any step."""


def initial_q(columns: int, rank: int, *, seed: int, layer: int) -> Floats:
    """Returns a layer's initial Q: i.i.d. standard normal numbers (Vogels et al. 2019, Algorithm 1, line 1).

    Args:
        columns: m, the number of rows of Q.
        rank: r, the number of columns of Q; a larger r only adds columns to the Q of a smaller r.
        seed: 64 bits, the key of the random stream.
        layer: 32 bits, the layer's hash, a word of the random counter.

    Returns:
        float32, shape (rank, columns): Q column by column.
    """
    return random_q(columns, rank, seed=seed, layer=layer, step=FIRST_STEP)


def random_q(columns: int, rank: int, *, seed: int, layer: int, step: int) -> Floats:
    """Returns the Q of one step, equal on all ranks: i.i.d. standard normal numbers (Vogels et al. 2019, section 4.1).

    Number k * columns + j is Q[j, k]. Philox maps the counter (2**32 - 1 - i, layer, step, OWNER_RANK) to four words.
    Number 2 i is computed from words 0 and 1, and number 2 i + 1 from words 2 and 3. The counters of the draws for the
    layer's elements ascend from 0, so the two kinds of draws use different counters. Box and Muller's sqrt(-2 ln u)
    cos(2 pi v) is evaluated in float64 by fixed polynomials, because the logarithm and the cosine of mathematical
    libraries differ in their last bits from machine to machine.

    Args:
        columns: m, as in `initial_q`.
        rank: r, as in `initial_q`.
        seed: 64 bits, the key of the random stream.
        layer: 32 bits, the layer's hash, a word of the random counter.
        step: 32 bits, a word of the random counter.

    Returns:
        float32, shape (rank, columns): Q column by column, not scaled.
    """
    one = np.array([columns]), np.array([rank]), np.array([layer], np.uint32)
    return random_factors(*one, seed=seed, step=step).reshape(rank, columns)


def random_factors(
    columns: Sizes, ranks: Sizes, layers: npt.NDArray[np.uint32], *, seed: int, step: int
) -> Floats:
    """Returns the Q of one step of every layer, one after another; see `random_q`.

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
    kept[(2 * ends - 1)[counts % 2 == 1]] = False  # an odd count leaves the last pair's second number unused
    return normal[kept]


def _log(x: Doubles) -> Doubles:
    """Returns ln x for positive x, to 1e-10: x = 2^e y with y about 1, and ln y = 2 artanh((y - 1) / (y + 1))."""
    y, e = np.frexp(x)
    small = y < 0.7071067811865476
    y, e = np.where(small, 2.0 * y, y), np.where(small, e - 1, e)
    s = (y - 1.0) / (y + 1.0)
    return e * 0.6931471805599453 + 2.0 * s * _polynomial(s * s, [1.0 / (2 * i + 1) for i in range(7)])


def _cos_turns(x: Doubles) -> Doubles:
    """Returns cos(2 pi x) for x in 0..1, to 1e-9, as the sine of an angle within a quarter turn."""
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
