"""PowerSGD: one step of subspace iteration per exchange, warm-started with the last one's result (004)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from gradcomp.compress.low_rank import LowRank, Matrices, clamped_rank, elements, matrix_shape
from gradcomp.compress.messages import Bytes, Context, Exchange, Floats, Sum
from gradcomp.core.errors import ConfigError
from gradcomp.core.layers import LayerSpec
from gradcomp.core.state import Begin
from gradcomp.kernels import lowrank
from gradcomp.kernels.codec import Group, Sizes
from gradcomp.kernels.selection import contribute

_P, _Q = "powersgd_p", "powersgd_q"


@dataclass(frozen=True)
class PowerSGD(LowRank):
    """Approximate each layer's mean, as an n x m matrix, by a product of rank ``rank``.

    With M = scale g + decay e on every rank (004, Algorithms 1 and 2):

        P = (1/N) sum over ranks of M Q;  P^ = orthonormal P;  Q' = (1/N) sum over ranks of M^T P^
        mean = P^ Q'^T;  e' = M - P^ (M^T P^)^T;  Q of the next step is Q'

    The mean is the projection of the mean M, so nothing is gathered, whatever the number of ranks. The first dimension
    of a tensor is n, all others together are m. Layers for which r (n + m) >= n m, vectors among them, travel exactly
    in the first sum. The level is the rank, at most min(n, m).

    ``alternate``: half an iteration per step, one Sum: P = mean M Q^ with the last orthonormal Q^ in even steps, mean =
    P Q^^T, and the other side in odd ones. Half the bytes. ``warm_start=False``: a fresh random Q each step (004,
    Table 2). ``feedback=False``: no e (004, Table 1).

    Wire: r n and r m floats, summed: two rounds of 2 d (N-1)/N bytes per rank; one round with ``alternate``.
    State: a residual per layer, and Q (r m floats, the same on all ranks); with ``alternate`` P too. At a new rank the
    columns are kept as far as there are any, and the others begin as all did, with normal numbers from the seed.
    Errors: ConfigError for a rank below 1.
    Source: 004, Algorithms 1 and 2. The residual is that of the *local* projection P^ P^^T M, Algorithm 2's line 8 as
    the readings have it. Differs: columns that vanish are zero instead of noise, and a column of Q that came out zero
    stays what it was; Q is kept scaled by a power of two. Momentum is the optimizer's, after this.
    """

    name: ClassVar[str] = "powersgd"

    warm_start: bool = True
    alternate: bool = False
    feedback: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in ("warm_start", "alternate", "feedback"):
            if not isinstance(getattr(self, field), bool):
                raise ConfigError(f"{field} must be true or false, got {getattr(self, field)!r}")
        if self.alternate and not self.warm_start:
            raise ConfigError("alternate goes on from the last step's factors: it needs warm_start")

    @property
    def keeps_residual(self) -> bool:
        """As ``feedback`` says: on by default, since a projection is biased."""
        return self.feedback

    @property
    def contributes(self) -> bool:
        """Yes: M."""
        return True

    def fields(self, layer: LayerSpec, seed: int) -> dict[str, tuple[int, Begin]]:
        """The factors of the last step."""
        found = super().fields(layer, seed)
        n, m = matrix_shape(layer.shape)
        rank = clamped_rank(layer.shape, self.rank)
        sides = {_Q: m, _P: n} if self.alternate else {_Q: m}
        for name, side in sides.items() if self.warm_start and rank else ():
            found[name] = (rank * side, _begin(side, rank, seed, layer.hash))
        return found

    def wire_bytes(self, group: Group) -> Sizes:
        """Both factors, or the one that travels in an even step."""
        return 4 * elements(group, lambda n, m, r: r * n if self.alternate else r * (n + m))

    def exchange(self, group: Group, context: Context) -> Exchange:
        """Two Sums, or one."""
        matrices = group.scratch.once("matrices", lambda: Matrices.of(group))
        if not len(matrices.low):
            return (yield from _exactly(group, context, matrices))
        return (yield from (self._half if self.alternate else self._whole)(group, context, matrices))

    def _whole(self, group: Group, context: Context, matrices: Matrices) -> Exchange:
        shape, p_at, q_at = matrices.shape, matrices.p_at, matrices.q_at

        def write_p(view: Floats) -> Bytes:
            flags = np.zeros(len(group.table), dtype=np.uint8)
            q = self._q(group, context, matrices)
            matrices.project(group, context, q, view[: matrices.p_size], flags)
            matrices.write_exact(group, context, view[matrices.p_size :], flags)
            return flags

        reply = yield Sum(matrices.p_size + matrices.exact_size, write_p)
        flags = reply.flags.copy()
        matrices.read_exact(group, context, reply.data[matrices.p_size :], flags)
        p = reply.data[: matrices.p_size]
        # A sum of M Q is the mean but for a factor, which the basis does not know.
        lowrank.orthogonalise(matrices.rows, matrices.ranks, p, p_at, beside=group.inputs[matrices.low])
        own_q = group.scratch.array("own_q", matrices.q_size)

        def write_q(view: Floats) -> Bytes:
            lowrank.back_project(group.inputs[matrices.low], *shape, p, p_at, view, q_at)
            own_q[:] = view
            return np.zeros(len(group.table), dtype=np.uint8)

        reply = yield Sum(matrices.q_size, write_q)
        q = reply.data
        if group.feedback:
            lowrank.subtract(group.inputs[matrices.low], *shape, p, p_at, own_q, q_at)
        matrices.expand(group, context, p, q, flags)
        if self.warm_start:
            _remember(_Q, group, context, q, matrices.columns, matrices)
        return flags

    def _half(self, group: Group, context: Context, matrices: Matrices) -> Exchange:
        shape, p_at, q_at = matrices.shape, matrices.p_at, matrices.q_at
        even = context.draw.step % 2 == 0
        size, basis_size = (matrices.p_size, matrices.q_size)[:: 1 if even else -1]
        own = group.scratch.array("own", size)
        basis = group.scratch.array("basis", basis_size)

        def write(view: Floats) -> Bytes:
            flags = np.zeros(len(group.table), dtype=np.uint8)
            basis[:] = context.load(_Q if even else _P, group.layers[matrices.low])
            table = group.inputs[matrices.low]
            if even:
                lowrank.orthogonalise(matrices.columns, matrices.ranks, basis, q_at, beside=table)
                matrices.project(group, context, basis, view[:size], flags)
            else:
                lowrank.orthogonalise(matrices.rows, matrices.ranks, basis, p_at, beside=table)
                found = np.zeros(len(table), dtype=np.uint8)
                contribute(table, found, context.factors(len(table)), decay=context.decay)
                lowrank.back_project(table, *shape, basis, p_at, view[:size], q_at)
                flags[matrices.low] |= found
            own[:] = view[:size]
            matrices.write_exact(group, context, view[size:], flags)
            return flags

        reply = yield Sum(size + matrices.exact_size, write)
        flags = reply.flags.copy()
        matrices.read_exact(group, context, reply.data[size:], flags)
        total = reply.data[:size]
        if group.feedback:
            p, q = (own, basis) if even else (basis, own)
            lowrank.subtract(group.inputs[matrices.low], *shape, p, p_at, q, q_at)
        p, q = (total, basis) if even else (basis, total)
        matrices.expand(group, context, p, q, flags)
        _remember(_P, group, context, p, matrices.rows, matrices)
        _remember(_Q, group, context, q, matrices.columns, matrices)
        return flags

    def _q(self, group: Group, context: Context, matrices: Matrices) -> Floats:
        if self.warm_start:
            return context.load(_Q, group.layers[matrices.low])
        hashes = group.table["layer"][matrices.low]
        return lowrank.random_factors(
            matrices.columns, matrices.ranks, hashes, seed=context.draw.seed, step=context.draw.step
        )


def _exactly(group: Group, context: Context, matrices: Matrices) -> Exchange:
    """Nothing in the group is worth approximating."""

    def write(view: Floats) -> Bytes:
        flags = np.zeros(len(group.table), dtype=np.uint8)
        matrices.write_exact(group, context, view, flags)
        return flags

    reply = yield Sum(matrices.exact_size, write)
    flags = reply.flags.copy()
    matrices.read_exact(group, context, reply.data, flags)
    return flags


def _begin(side: int, rank: int, seed: int, layer: int) -> Begin:
    def begin(old: Floats) -> Floats:
        fresh = lowrank.initial_q(side, rank, seed=seed, layer=layer).reshape(-1)
        kept = min(old.size, fresh.size)
        fresh[:kept] = old[:kept]
        return fresh

    return begin


def _remember(
    name: str, group: Group, context: Context, factor: Floats, sides: Sizes, matrices: Matrices
) -> None:
    """Keep a factor for the next step, each column scaled by a power of two to a largest magnitude below 1.

    The basis of a product does not depend on it, and no number can grow or vanish over the steps. A column of zeros
    would stay zero for ever: the one that was there before goes on instead.
    """
    layers = group.layers[matrices.low]
    lengths = np.repeat(sides, matrices.ranks)
    with np.errstate(all="ignore"):
        largest = np.maximum.reduceat(np.abs(factor), np.cumsum(lengths) - lengths)
        scaled = np.ldexp(factor, np.repeat(-np.frexp(largest)[1], lengths))
    kept = np.repeat(largest == 0, lengths)
    context.store(name, layers, np.where(kept, context.load(name, layers), scaled))
