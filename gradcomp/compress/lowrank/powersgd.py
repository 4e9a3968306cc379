"""PowerSGD: a step of subspace iteration per exchange, warm-started with the last result (Vogels et al. 2019)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from gradcomp.compress.base import Traits
from gradcomp.compress.lowrank.base import LowRank, Matrices, clamped_rank, elements, matrix_shape
from gradcomp.compress.messages import Bytes, Exchange, Floats, Sum
from gradcomp.compress.registry import register
from gradcomp.core.errors import ConfigError
from gradcomp.core.layers import LayerSpec
from gradcomp.core.state import Begin
from gradcomp.kernels import lowrank, subspace
from gradcomp.kernels.codec import Group, Sizes
from gradcomp.kernels.selection import contribute
from gradcomp.kernels.step import StepContext

_P, _Q = "powersgd_p", "powersgd_q"


@register("powersgd")
@dataclass(frozen=True)
class PowerSGD(LowRank):
    """Approximate each layer's mean, as an n x m matrix, by a product of rank ``rank``.

    With M = scale g + decay e on every rank (Vogels et al. 2019, Algorithms 1 and 2):

        P = (1/N) sum over ranks of M Q;  P^ = orthonormal P;  Q' = (1/N) sum over ranks of M^T P^
        mean = P^ Q'^T;  e' = M - P^ (M^T P^)^T;  Q of the next step is Q'

    The mean is the projection of the mean M, so nothing is gathered, whatever the number of ranks. The first dimension
    of a tensor is n, all others together are m. Layers for which r (n + m) >= n m, vectors among them, travel exactly
    in the first sum. The level is the rank, at most min(n, m).

    ``alternate``: half an iteration per step, one Sum: P = mean M Q^ with the last orthonormal Q^ in even steps, mean =
    P Q^^T, and the other side in odd ones. Half the bytes. ``warm_start=False``: a fresh random Q each step (Vogels et
    al. 2019, Table 2). ``feedback=False``: no e (Vogels et al. 2019, Table 1).

    Wire: r n and r m floats, summed: two rounds of 2 d (N-1)/N bytes per rank; one round with ``alternate``.
    State: a residual per layer, and Q (r m floats, the same on all ranks); with ``alternate`` P too. At a new rank the
    columns are kept as far as there are any, and the others begin as all did, with normal numbers from the seed.
    Errors: ConfigError for a rank below 1.
    Source: Vogels et al. 2019, Algorithms 1 and 2. The residual is that of the *local* projection P^ P^^T M: see
    docs/decisions/0024. Differs: columns that vanish are zero instead of noise, and a column of Q that
    came out zero stays what it was; Q is kept scaled by a power of two. Momentum is the optimizer's, after this.
    """

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

    @cached_property
    def traits(self) -> Traits:
        """M in memory; a residual by default, since a projection is biased."""
        return Traits(keeps_residual=self.feedback, contributes=True)

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

    def exchange(self, group: Group, context: StepContext) -> Exchange:
        """Two Sums, or one."""
        matrices = group.scratch.once("matrices", lambda: Matrices.of(group))
        if not len(matrices.low):
            return (yield from _exactly(group, context, matrices))
        return (yield from (self._half if self.alternate else self._whole)(group, context, matrices))

    def _whole(self, group: Group, context: StepContext, matrices: Matrices) -> Exchange:
        scratch = group.scratch
        scratch.once("placed", matrices.place)
        own = scratch.array("own_q", matrices.q_size, device=scratch.device)
        divisor, scale = context.divisor, context.unscale
        flags = np.zeros(len(group.table), dtype=np.uint8)

        def write_p(view: Floats) -> Bytes:
            factors, q = context.factors(len(flags)), self._q(group, context, matrices)
            subspace.project(matrices, flags, factors, q, view, scale=context.scale, decay=context.decay)
            return flags

        p = yield Sum(matrices.p_size + matrices.exact_size, write_p, by_kernels=True)
        found = p.flags.copy()

        def write_q(view: Floats) -> Bytes:
            subspace.iterate(matrices, found, p.data, view, own, divisor=divisor, scale=scale)
            return np.zeros_like(flags)

        q = yield Sum(matrices.q_size, write_q, by_kernels=True)
        kept = self._kept(group, context, matrices) if self.warm_start else None
        left = own if group.feedback else None
        subspace.finish(matrices, found, p.data, left, q.data, kept, divisor=divisor, scale=scale)
        return found

    def _half(self, group: Group, context: StepContext, matrices: Matrices) -> Exchange:
        even = context.draw.step % 2 == 0
        size, basis_size = (matrices.p_size, matrices.q_size)[:: 1 if even else -1]
        own = group.scratch.array("own", size)
        basis = group.scratch.array("basis", basis_size)

        def write(view: Floats) -> Bytes:
            low, exact = matrices.split(np.zeros(len(group.table), dtype=np.uint8))
            basis[:] = context.load(_Q if even else _P, group.layers[matrices.low])
            table, rest = group.inputs[matrices.low], view[size:]
            if even:
                q = matrices.q(basis)
                lowrank.orthogonalise(matrices.columns, matrices.ranks, q, beside=table)
                matrices.project(table, context, q, view[:size], low)
            else:
                p = matrices.p(basis)
                lowrank.orthogonalise(matrices.rows, matrices.ranks, p, beside=table)
                contribute(table, low, context.factors(len(table)), decay=context.decay)
                lowrank.back_project(table, matrices.shapes, p, matrices.q(view[:size]))
            own[:] = view[:size]
            matrices.write_exact(group, context, rest, exact)
            flags = matrices.join(low, exact)
            matrices.spoil(rest, flags)
            return flags

        reply = yield Sum(size + matrices.exact_size, write)
        low, exact = matrices.split(reply.flags)
        matrices.read_exact(group, context, reply.data[size:], exact)
        total = reply.data[:size]
        if group.feedback:
            p, q = (own, basis) if even else (basis, own)
            sent = matrices.p(p), matrices.q(q)
            lowrank.subtract(group.inputs[matrices.low], matrices.shapes, *sent)
        p, q = (total, basis) if even else (basis, total)
        matrices.expand(group, context, p, q, low)
        _remember(_P, group, context, p, matrices)
        _remember(_Q, group, context, q, matrices)
        return matrices.join(low, exact)

    def _kept(self, group: Group, context: StepContext, matrices: Matrices) -> subspace.Kept:
        layers = group.scratch.once("low", lambda: group.layers[matrices.low])
        field = context.field(_Q)
        return subspace.Kept(field.memory, *field.places(layers))

    def _q(self, group: Group, context: StepContext, matrices: Matrices) -> lowrank.Factor:
        """The Q that this step begins with."""
        if self.warm_start:
            kept = self._kept(group, context, matrices)
            return lowrank.Factor(kept.memory, kept.before)
        hashes = group.table["layer"][matrices.low]
        fresh = lowrank.random_factors(
            matrices.columns, matrices.ranks, hashes, seed=context.draw.seed, step=context.draw.step
        )
        return matrices.q(fresh)


def _exactly(group: Group, context: StepContext, matrices: Matrices) -> Exchange:
    """Nothing in the group is worth approximating."""

    def write(view: Floats) -> Bytes:
        flags = np.zeros(len(group.table), dtype=np.uint8)
        matrices.write_exact(group, context, view, flags)
        matrices.spoil(view, flags)
        return flags

    reply = yield Sum(matrices.exact_size, write, by_kernels=True)
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


def _remember(name: str, group: Group, context: StepContext, factor: Floats, matrices: Matrices) -> None:
    """Keep a factor for the next step, each column scaled by a power of two to a largest magnitude below 1.

    The basis of a product does not depend on it, and no number can grow or vanish over the steps. A column of zeros
    would stay zero for ever: the one that was there before goes on instead.
    """
    kept = context.field(name)
    sides, columns = (
        (matrices.rows, matrices.p(factor)) if name == _P else (matrices.columns, matrices.q(factor))
    )
    places = kept.places(group.layers[matrices.low])
    beside = group.inputs[matrices.low]
    lowrank.keep(sides, matrices.ranks, columns, kept.memory, *places, beside=beside)
