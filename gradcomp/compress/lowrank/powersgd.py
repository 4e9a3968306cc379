"""PowerSGD and UnbiasedRank sum products with factors that all ranks share, so nothing is gathered."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np

from gradcomp.compress.base import Traits
from gradcomp.compress.bounds import Distortion
from gradcomp.compress.checks import check_flag
from gradcomp.compress.lowrank.base import EXACT, LowRank, Matrices, clamped_rank, elements, matrix_shape
from gradcomp.compress.messages import Bytes, Exchange, Floats, Sum
from gradcomp.compress.registry import register
from gradcomp.core.errors import ConfigError
from gradcomp.core.layers import LayerSpec
from gradcomp.core.state import Begin, DoubleBuffer
from gradcomp.kernels import replayed_calls, subspace
from gradcomp.kernels.codec import Group, Sizes, Table
from gradcomp.kernels.random_factors import initial_q, random_factors
from gradcomp.kernels.segments import Factor
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

    ``alternate``: half an iteration per step, with one Sum and half the bytes: in even steps P = mean of M Q^, with the
    last orthonormal Q^, and mean = P Q^^T; in odd steps the two sides are exchanged. ``warm_start=False``: a new random
    Q in each step (Vogels et al. 2019, Table 2). ``feedback=False``: there is no e (Vogels et al. 2019, Table 1).

    Wire: r n and r m floats, summed: two rounds of 2 d (N-1)/N bytes per rank; one round with ``alternate``.
    State: a residual per layer, and Q (r m floats, the same on all ranks); with ``alternate`` P too. When the rank
    changes, existing columns are kept, and new ones begin as all did, with normal numbers from the seed.
    Errors: ConfigError for a rank below 1.
    Source: Vogels et al. 2019, Algorithms 1 and 2. The residual is that of the *local* projection P^ P^^T M: see
    docs/decisions/0024. Differs: columns that vanish are zero instead of noise, and a column of Q that would become
    zero keeps its last value; Q is kept scaled by a power of two. Momentum is the optimizer's, after the exchange.
    """

    warm_start: bool = True
    alternate: bool = False
    feedback: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in ("warm_start", "alternate", "feedback"):
            check_flag(field, getattr(self, field))
        if self.alternate and not self.warm_start:
            raise ConfigError("alternate continues from the last step's factors, so it needs warm_start=true")

    @cached_property
    def traits(self) -> Traits:
        """Return a residual by default, because a projection is biased; M is kept in memory."""
        return Traits(keeps_residual=self.feedback, contributes=True)

    def fields(self, layer: LayerSpec, seed: int) -> dict[str, tuple[int, Begin]]:
        """Return the factors of the last step."""
        found = super().fields(layer, seed)
        n, m = matrix_shape(layer.shape)
        rank = clamped_rank(layer.shape, self.rank)
        sides = {_Q: m, _P: n} if self.alternate else {_Q: m}
        for name, side in sides.items() if self.warm_start and rank else ():
            found[name] = (rank * side, partial(_begin, side, rank, seed, layer.hash))
        return found

    def wire_bytes(self, group: Group) -> Sizes:
        """Return the bytes of both factors, or of the one that travels in an even step."""
        return 4 * elements(group, lambda n, m, r: r * n if self.alternate else r * (n + m))

    def exchange(self, group: Group, context: StepContext) -> Exchange:
        """Request two Sums, or one where factors alternate or nothing is approximated."""
        matrices = group.scratch.once("matrices", lambda: Matrices.of(group))
        if not len(matrices.low):
            return (yield from _exactly(group, context, matrices))
        return (yield from (self._half if self.alternate else self._whole)(group, context, matrices))

    def _whole(self, group: Group, context: StepContext, matrices: Matrices) -> Exchange:
        inputs, outputs = group.inputs, group.table
        memory = group.scratch.once("memory", lambda: _Memory(group, matrices))
        own, flags, found = memory.own, memory.flags, memory.found
        divisor, scale = context.divisor, context.unscale
        kernels = group.device.kernels

        def write_p(view: Floats) -> Bytes:
            flags.fill(0)
            kept, turn = self._kept_q(context, memory)
            if kept is None:
                draw, sides = context.draw, (matrices.columns, matrices.ranks)
                memory.fresh[:] = random_factors(*sides, memory.hashes, seed=draw.seed, step=draw.step)
            values = memory.fresh if kept is None else kept.memory

            def work() -> None:
                begins = matrices.q_at if kept is None else kept.places(memory.layers)[0]
                q, factors = Factor(values, begins), context.factors(len(flags))
                kernels.subspace_project(
                    matrices, flags, factors, q, view, scale=context.scale, decay=context.decay
                )

            replayed_calls.run((context.scale, context.decay, turn), (inputs, view, values), work)
            return flags

        p = yield Sum(matrices.p_size + matrices.exact_size, write_p, by_kernels=True)
        found[:] = p.flags

        def write_q(view: Floats) -> Bytes:
            def work() -> None:
                kernels.subspace_iterate(matrices, found, p.data, view, own, divisor=divisor, scale=scale)

            replayed_calls.run(
                (divisor, scale, _written(outputs)), (inputs, outputs, p.data, view, own, found), work
            )
            return memory.none

        q = yield Sum(matrices.q_size, write_q, by_kernels=True)
        kept, turn = self._kept_q(context, memory)

        def work() -> None:
            left = own if group.feedback else None
            places = None if kept is None else subspace.Kept(kept.memory, *kept.places(memory.layers))
            kernels.subspace_finish(
                matrices, found, p.data, left, q.data, places, divisor=divisor, scale=scale
            )

        arrays = (inputs, outputs, p.data, own, q.data, found, None if kept is None else kept.memory)
        replayed_calls.run((divisor, scale, turn, _written(outputs)), arrays, work)
        return found

    def _half(self, group: Group, context: StepContext, matrices: Matrices) -> Exchange:
        kernels, even = group.device.kernels, context.draw.step % 2 == 0
        size, basis_size = (matrices.p_size, matrices.q_size)[:: 1 if even else -1]
        own = group.scratch.array("own", size)
        basis = group.scratch.array("basis", basis_size)

        def write(view: Floats) -> Bytes:
            low, exact = matrices.split(np.zeros(len(group.table), dtype=np.uint8))
            basis[:] = context.load(_Q if even else _P, group.layers[matrices.low])
            table, rest = group.inputs[matrices.low], view[size:]
            if even:
                q = matrices.q(basis)
                kernels.orthogonalise(matrices.columns, matrices.ranks, q)
                matrices.project(group.device, table, context, q, view[:size], low)
            else:
                p = matrices.p(basis)
                kernels.orthogonalise(matrices.rows, matrices.ranks, p)
                kernels.contribute(table, low, context.factors(len(table)), decay=context.decay)
                kernels.back_project(table, matrices.shapes, p, matrices.q(view[:size]))
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
            group.device.kernels.subtract(group.inputs[matrices.low], matrices.shapes, *sent)
        p, q = (total, basis) if even else (basis, total)
        matrices.expand(group, context, p, q, low)
        _remember(_P, group, context, p, matrices)
        _remember(_Q, group, context, q, matrices)
        return matrices.join(low, exact)

    def _kept_q(self, context: StepContext, memory: _Memory) -> tuple[DoubleBuffer | None, bytes]:
        """Return the field that keeps Q over steps, and which of its two buffers holds the last step's."""
        if not self.warm_start:
            return None, b""
        kept = context.field(_Q)
        return kept, kept.turn(memory.layers)


class _Memory:
    """Hold what a group needs in every step: the same arrays each time, so that a device can replay its calls.

    ``own`` is this rank's Q, and ``fresh`` a Q that is drawn. ``flags`` are those of the data that are sent, ``found``
    those of the mean, and ``none`` has no flag set. ``layers`` and ``hashes`` are those of the matrices.
    """

    def __init__(self, group: Group, matrices: Matrices) -> None:
        matrices.place()
        self.own: Floats = group.device.array(matrices.q_size, np.float32)
        self.none, self.flags, self.found = np.zeros((3, len(group.table)), dtype=np.uint8)
        self.layers = group.layers[matrices.low]
        self.hashes = group.table["layer"][matrices.low]
        self.fresh = np.zeros(matrices.q_size, np.float32)


def _written(table: Table) -> bytes:
    written: bytes = (table["output"] != 0).tobytes()
    return written


def _exactly(group: Group, context: StepContext, matrices: Matrices) -> Exchange:
    """Request one Sum, for a group in which no layer is worth approximating."""
    inputs, outputs = group.inputs, group.table
    memory = group.scratch.once("memory", lambda: _Memory(group, matrices))
    flags, found = memory.flags, memory.found

    def write(view: Floats) -> Bytes:
        flags.fill(0)
        scale, decay = context.scale, context.decay
        replayed_calls.run(
            (scale, decay),
            (inputs, view),
            lambda: EXACT.encode(
                group.device, inputs, view.view(np.uint8), flags, context.draw, scale, decay
            ),
            lambda: matrices.spoil(view, flags),
        )
        return flags

    reply = yield Sum(matrices.exact_size, write, by_kernels=True)
    found[:] = reply.flags
    total = reply.data.view(np.uint8)
    replayed_calls.run(
        (context.divisor, context.unscale, _written(outputs)),
        (outputs, reply.data, found),
        lambda: EXACT.decode(group.device, outputs, total, found, context.divisor, context.unscale),
    )
    return found


def _begin(side: int, rank: int, seed: int, layer: int, old: Floats) -> Floats:
    """Return the old columns as far as they go, and new ones after them."""
    fresh = initial_q(side, rank, seed=seed, layer=layer).reshape(-1)
    kept = min(old.size, fresh.size)
    fresh[:kept] = old[:kept]
    return fresh


def _remember(name: str, group: Group, context: StepContext, factor: Floats, matrices: Matrices) -> None:
    """Keep a factor for the next step, each column scaled by a power of two to a largest magnitude below 1.

    The basis of a product does not depend on the scale, and no number can grow or vanish over the steps. A column of
    zeros would stay zero for ever, so the column of the step before is kept instead.
    """
    kept = context.field(name)
    of_p = name == _P
    sides = matrices.rows if of_p else matrices.columns
    columns = matrices.p(factor) if of_p else matrices.q(factor)
    places = kept.places(group.layers[matrices.low])
    group.device.kernels.keep(sides, matrices.ranks, columns, kept.memory, *places)


@register("unbiased_rank")
@dataclass(frozen=True)
class UnbiasedRank(LowRank):
    """Send the product of each layer's matrix with ``rank`` random directions, which are drawn anew in every step.

    M = scale g is a rank's n x m matrix. U is m x r, with normal entries of variance 1 / r, so that E[U U^T] = I:

        P = sum over ranks of M U;  mean = P U^T / N

    This is a baseline: its test accuracy is 71 to 76%, that of PowerSGD 94% (Vogels et al. 2019, Table 1). The expected
    error is 0, so no residual is kept. The norm of the error is about sqrt(m / r) times that of M, so ErrorFeedback is
    refused.

    n is the first dimension of a tensor, and m the product of the others. Layers for which r (n + m) >= n m, vectors
    among them, travel exactly. The level is the rank, at most min(n, m).

    Wire: r n floats per layer in one Sum, which sends 2 d (N-1)/N bytes per rank with a ring, for d = 4 r n. Every rank
    draws U from the seed.
    State: none.
    Errors: ConfigError for a rank that is not a whole number in 1 .. 2**15 - 1.
    Source: Vogels et al. 2019, section 4.1 and Table 1. The paper leaves the distribution of U open; here it is normal.
    """

    def distortion(self, layer: LayerSpec) -> Distortion:
        """Return the variance: E||x (U U^T - I)||^2 = ||x||^2 (m + 1) / r for every row x."""
        rank = clamped_rank(layer.shape, self.rank)
        return Distortion((matrix_shape(layer.shape)[1] + 1) / rank if rank else 0.0, True)

    @cached_property
    def traits(self) -> Traits:
        return Traits(contributes=True)

    def wire_bytes(self, group: Group) -> Sizes:
        return 4 * elements(group, lambda n, m, r: r * n)

    def exchange(self, group: Group, context: StepContext) -> Exchange:
        matrices = group.scratch.once("matrices", lambda: Matrices.of(group))
        u = _directions(group, context, matrices)
        own = group.scratch.array("own", matrices.p_size)

        def write(view: Floats) -> Bytes:
            low, exact = matrices.split(np.zeros(len(group.table), dtype=np.uint8))
            rest = view[matrices.p_size :]
            table = group.inputs[matrices.low]
            with group.device.kernels.together() as started:
                matrices.project(group.device, table, context, matrices.q(u), view[: matrices.p_size], low)
                matrices.write_exact(group, context, rest, exact)
            started.finish()
            own[:] = view[: matrices.p_size]
            flags = matrices.join(low, exact)
            matrices.spoil(rest, flags)
            return flags

        reply = yield Sum(matrices.p_size + matrices.exact_size, write)
        low, exact = matrices.split(reply.flags)
        p, table = reply.data[: matrices.p_size], group.inputs[matrices.low]
        with group.device.kernels.together() as started:
            matrices.read_exact(group, context, reply.data[matrices.p_size :], exact)
            if group.feedback:
                group.device.kernels.subtract(table, matrices.shapes, matrices.p(own), matrices.q(u))
            matrices.expand(group, context, p, u, low)
        started.finish()
        return matrices.join(low, exact)


def _directions(group: Group, context: StepContext, matrices: Matrices) -> Floats:
    """Return U of every approximated layer, bit-identical on all ranks."""
    hashes = group.table["layer"][matrices.low]
    seed, step = context.draw.seed, context.draw.step
    normal = random_factors(matrices.columns, matrices.ranks, hashes, seed=seed, step=step)
    roots = np.sqrt(matrices.ranks).astype(np.float32)
    scaled: Floats = normal / np.repeat(roots, matrices.ranks * matrices.columns)
    return scaled
