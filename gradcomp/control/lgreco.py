"""L-GreCo chooses the cheapest level of every layer within the error of a reference."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from gradcomp.compress import Compressor
from gradcomp.compress.checks import check_flag, check_positive, check_whole, check_word
from gradcomp.control.base import Doubles, Environment, Numbers
from gradcomp.control.candidates import (
    HYBRID,
    CandidateLevels,
    Candidates,
    check_levels,
    default_levels,
    hybrid_levels,
    make_candidates,
    resolve,
)
from gradcomp.control.observations import Decision, PeriodObservations
from gradcomp.control.periodic import Periodic
from gradcomp.control.two_levels import NEVER, Accordion, remembered
from gradcomp.core.errors import ConfigError
from gradcomp.core.layers import LayerSpec
from gradcomp.core.plan import MOST_BLOCKS
from gradcomp.kernels import program

logger = logging.getLogger("gradcomp")

#: Weight of older periods when coefficients of time are fitted.
_MEMORY = 0.5
#: Weight of the common coefficient in that of each layer, relative to the mean layer's own times.
_PULL = 0.1
#: Steps of a period whose errors are averaged, unless the user says otherwise.
_SAMPLES = 4

#: Steps whose gradients are summed before losses are measured: those of the paper's runs (section 3).
_LOSS_STEPS = 50

_MOST_BUCKETS = 10**6

#: Least steps of the budget per row if layers are divided into blocks, since each row's error is rounded up to a step.
_STEPS_PER_BLOCK = 16


@dataclass(frozen=True)
class LGreCo(Periodic):
    """Chooses levels by a dynamic program: the least cost with a total error no larger than the reference's.

    minimise sum over layers of w(l) bytes(l, c_l)   subject to   sum of error(l, c_l) <= alpha sum of error(l, r_l),

    error(l, c) = mean over sampled steps t of ||g_{l,t} - C_c(g_{l,t})||^2, with g_{l,t} the gradient of layer l in
    step t, before compression and without error feedback (with the residual if all choices are of low rank); C_c
    compresses and decompresses; r_l, the reference, is the layer's own compression.

    ``metric`` selects the error. With ``"squared"``, the errors of layers add up to the squared error of the model;
    ``"norm"`` takes their roots; ``"adam"`` takes

        error(l, c) = mean over t of ||g_{l,t} - C_c(g_{l,t})||^2 / rms(l),

    where rms(l), the root of the mean square of the layer's elements, stands for the root of Adam's second moment: the
    squared error in the norm of that preconditioner. ``"loss"`` measures

        error(l, c) = |L(w + s (G_l - C_c(G_l))) - L(w)|,

    with L the training loss on a batch that the frontend's ``sensitivity`` gives, w the current parameters, and G_l the
    gradient summed over a window of 50 steps. s is the optimizer's step for a gradient: L(w + ...) is the loss if this
    sum had been applied as it is compressed. The owner of a layer measures it, ``probes_per_step`` choices after a
    step, each with a forward pass, and one more for L(w).

    ``blocks=B`` divides a matrix under ``Quantize`` into up to B blocks of consecutive rows, nearly equal, of four
    quantisation buckets or more on average. Each block is an item of the program with its own level, if all choices of
    the layer are numbers of bits of one ``Quantize``; all that is said of layers then holds for blocks. The budget has
    at least 16 steps per item. A block without a gradient keeps its level. See ``docs/decisions/0038``.

    Layers without a gradient in the period keep their level. If no choice is within the budget, the reference is used
    and a warning is logged.

    Args:
        every_steps: steps in a period.
        levels: candidates, which are levels or compressors, of several families if you like; by default the paper's
            ranges, [D/2, 2 D] for bits and ranks, [D/10, 10 D] for densities. ``"hybrid"``: 5 numbers of bits, 4
            densities and 4 ranks, which differ between convolutions and matrices.
        alpha: factor on the budget (Markov 2024, section 3.6).
        buckets: steps into which the budget is divided; errors are rounded up to whole steps, at least one.
        objective: ``"bytes"``, w = 1. ``"time"``, w = T(l), seconds per further byte of the layer's exchange buckets,
            fitted with a common latency to the wire times of past periods, each weighted half as much as the next.
            ``"position"``, w = the position of the layer's last exchange bucket, from 1 (Markov 2024, appendix B.1).
        metric: ``"squared"``, ``"norm"``, ``"adam"`` or ``"loss"``; by default ``"squared"`` with samples, ``"norm"``
            with a window. ``"loss"`` has a window, and needs ``sensitivity=`` of the wrapper.
        samples: steps of a period that are sampled, 4 by default.
        window: instead, as in the paper, error(l, c) = ||G_l - C_c(G_l)||, with G_l the gradient summed over the last
            ``window`` steps of the period. An embedding's gradient is sparse in a single step but dense in such a sum.
        accordion: its choice is each period's reference (section 5.3); ``levels`` are then by default the range from
            its high compression's range to its low one's. Gradients are summed by default, since its rule compares
            their norms.
        widen: if more than half of the elements under a compressor are at an end of its default range, the ranges
            become [D/4, 4 D] for ranks and [D/100, 10 D] for densities, once, and the log says so. Bits keep their
            range, and so do block floats, whose range is of formats: 8 and 4 bits.
        blocks: the most blocks of a layer, up to 256.
        probes_per_step: losses that a rank measures after a step, with ``metric="loss"``.
        memory_bytes: see :class:`Periodic`; the computation of losses is not counted.

    Wire, State: see :class:`Periodic`.

    Errors: ConfigError for empty or impossible ``levels``, a reference that is outside of them or has levels by block,
    ``alpha``, ``buckets``, ``blocks`` or ``probes_per_step`` that are not positive, unknown words; ``metric="loss"``
    with ``samples`` or ``blocks``, or without a loss.

    Source: Markov et al. 2024, Algorithm 1 and sections 3, 4 and 5.4; Markov 2024, chapter 4 and appendix B.
    Differences: errors are those of single steps by default (the authors' published hook takes the last 10 steps, after
    the residual was added); layers are measured by the ranks that own them instead of by one worker, each on its own
    gradients; the budget is the sum of the rounded errors (otherwise the reference itself would not fit); of equal
    costs the smaller error is taken; bytes are those on the wire, with scales and indices, and for TopK without zeros
    those of the average number of nonzero elements in the sampled steps, or of their number in the sum; all families
    can be mixed. The paper's losses
    are those at the end of runs of 50 steps from a checkpoint, a run for each layer and choice, in which every step's
    gradient of the layer is compressed; here the sum of 50 steps is compressed, while training goes on.
    """

    name: ClassVar[str] = "lgreco"
    tells_ends: ClassVar[bool] = True

    every_steps: int = 100
    levels: Candidates | None = None
    alpha: float = 1.0
    buckets: int = 10_000
    objective: str = "bytes"
    metric: str | None = None
    accordion: Accordion | None = field(default=None, kw_only=True)
    widen: bool = field(default=True, kw_only=True)
    blocks: int = field(default=1, kw_only=True)
    probes_per_step: int = field(default=4, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_levels(self.levels)
        check_positive("alpha", self.alpha)
        check_whole("buckets", self.buckets, most=_MOST_BUCKETS)
        check_whole("blocks", self.blocks, most=MOST_BLOCKS)
        check_word("objective", self.objective, ("bytes", "time", "position"))
        if self.metric is not None:
            check_word("metric", self.metric, ("norm", "squared", "adam", "loss"))
        if self.accordion is not None and not isinstance(self.accordion, Accordion):
            raise ConfigError(f"accordion must be an Accordion, got {self.accordion!r}")
        check_flag("widen", self.widen)
        check_whole("probes_per_step", self.probes_per_step)
        if self.needs_losses and self.samples is not None:
            raise ConfigError(
                f'metric="loss" sums gradients: give window= in place of samples={self.samples}'
            )
        if self.needs_losses and self.blocks > 1:
            raise ConfigError(f'metric="loss" measures whole layers: leave blocks={self.blocks} away')

    @property
    def sampled(self) -> int:
        """Returns 4 by default, unless gradients are summed."""
        adds_up = self.window is not None or self.accordion is not None or self.needs_losses
        return super().sampled or (0 if adds_up else _SAMPLES)

    @property
    def summed(self) -> int:
        """Returns the steps whose gradients are summed: 50 by default if losses are measured."""
        return min(_LOSS_STEPS, self.every_steps) if self.needs_losses and not self.window else super().summed

    @property
    def needs_losses(self) -> bool:
        return self.metric == "loss"

    @property
    def squared(self) -> bool:
        """Returns true if squared errors are budgeted."""
        return self.metric in ("squared", "adam") or (self.metric is None and self.sampled > 0)

    @property
    def by_times(self) -> bool:
        return self.objective == "time"

    @property
    def needs_errors(self) -> bool:
        return True

    def candidates(self) -> Candidates | None:
        return self.levels

    def candidate_levels(self, environment: Environment) -> CandidateLevels:
        """Returns the choices; with Accordion, its two levels and by default the ranges around both."""
        return self._ranges(environment, wide=False)

    def wider_levels(self, environment: Environment) -> CandidateLevels | None:
        """Returns the wide ranges if ``widen`` is set and the ranges are default ones."""
        return self._ranges(environment, wide=True) if self.widen and self.levels is None else None

    def _ranges(self, environment: Environment, wide: bool) -> CandidateLevels:
        rule = self.accordion

        def candidates(layer: LayerSpec, own: Compressor) -> Candidates:
            assert rule is not None, "there is one"
            ends = [resolve(own, rule.high), resolve(own, rule.low)]
            if self.levels == HYBRID:
                return [*hybrid_levels(layer), *ends]
            if self.levels is not None:
                return [*self.levels, *ends]
            return [resolve(end, found) for end in ends for found in default_levels(end, wide)]

        given = self.levels if rule is None else candidates
        return make_candidates(environment, given, wide=wide, blocks=self.blocks)

    def begin_memory(self, candidates: CandidateLevels) -> Doubles:
        """Returns norms of the last period (:data:`NEVER` at first), sums for the time coefficients, and a flag.

        The flag is 1 once a warning was given.
        """
        rows = len(candidates.layers)
        return np.concatenate([np.full(rows, NEVER), np.zeros(self._sums * rows), [0.0]])

    @property
    def _sums(self) -> int:
        """Returns the sums by layer for the time coefficients; other objectives keep two, as in older checkpoints."""
        return 5 if self.objective == "time" else 2

    def decide(self, observed: PeriodObservations) -> Decision:
        """Solves the program over the rows that had a gradient."""
        assert observed.errors is not None, "asked for"
        rows = len(observed.norm)
        memory = observed.memory.copy()
        norms, fits, warned = np.split(memory, [rows, (1 + self._sums) * rows])
        fits = fits.reshape(self._sums, rows)
        if self.objective == "time":
            y, x = observed.wire, observed.sent
            fits *= _MEMORY
            fits += np.where((x > 0) & (y > 0), [x * y, x * x, x, y, np.ones(rows)], 0.0)
        reference = self._reference(observed, norms)
        norms[:] = remembered(norms, observed.norm)
        choices = observed.current.copy()
        heard = np.flatnonzero(~observed.silent)
        errors = self._budgeted(observed)[heard]
        allowed = np.take_along_axis(errors, reference[heard, None], axis=1)[:, 0]
        costs = observed.costs[heard] * self._weights(observed, fits)[heard, None]
        found = self.solve(errors, allowed, costs)
        if found is None:
            if not warned[0]:
                logger.warning("lgreco: no choice of levels is within the budget; layers use the reference")
            warned[0] = 1.0
            found = reference[heard]
        choices[heard] = found
        return Decision(choices, memory, self._words(observed, choices, reference))

    def _budgeted(self, observed: PeriodObservations) -> Doubles:
        """Returns the budgeted errors by row and choice; those of rows without a gradient are meaningless."""
        assert observed.errors is not None, "asked for"
        if self.needs_losses:
            assert observed.losses is not None, "asked for"
            return observed.losses
        if not self.squared:
            return observed.errors
        squares: Doubles = observed.errors**2
        if self.metric == "adam":
            sizes = np.array([spec.size for spec in observed.candidates.specs], dtype=np.float64)
            inverse = np.sqrt(np.maximum(sizes, 1)) / np.where(observed.silent, 1.0, observed.norm)
            squares *= inverse[:, None]
        return squares

    def solve(self, errors: Doubles, allowed: Doubles, costs: Doubles) -> Numbers | None:
        """Returns the choices of least cost within ``alpha`` times the allowed errors, by row; None if there are none.

        Rows of ``errors`` and ``costs`` are items, columns their choices, infinite where an item lacks one.
        """
        if not len(errors):
            return np.zeros(0, dtype=np.int64)
        if not np.isfinite(allowed).all():
            return None
        if not allowed.any():  # the reference has no error, so only choices without an error are allowed
            free = np.where(errors == 0, costs, np.inf)
            return free.argmin(axis=1) if np.isfinite(free.min(axis=1)).all() else None
        buckets = self.buckets if self.blocks == 1 else max(self.buckets, _STEPS_PER_BLOCK * len(errors))
        steps, budget = program.discretise(errors, allowed, min(buckets, _MOST_BUCKETS), self.alpha)
        found = program.cheapest(steps, costs, budget)
        return None if found is None else found.astype(np.int64)

    def _reference(self, observed: PeriodObservations, before: Doubles) -> Numbers:
        """Returns the choice of every row that sets the budget."""
        rule, candidates = self.accordion, observed.candidates
        if rule is None:
            return candidates.reference
        own = [(c, c[k]) for c, k in zip(candidates.choices, candidates.reference.tolist(), strict=True)]
        low, high = ([c.index(resolve(o, level)) for c, o in own] for level in (rule.low, rule.high))
        return np.where(rule.critical(before, observed), low, high).astype(np.int64)

    def _weights(self, observed: PeriodObservations, fits: Doubles) -> Doubles:
        """Returns the cost of a byte by row."""
        if self.objective == "position":
            return observed.position.astype(np.float64) + 1.0
        if self.objective == "time" and (slopes := seconds_per_byte(fits)) is not None:
            return slopes
        return np.ones(len(observed.norm))

    def _words(self, observed: PeriodObservations, choices: Numbers, reference: Numbers) -> str:
        rows = np.arange(len(choices))
        costs, errors = observed.costs, self._budgeted(observed)

        def total(chosen: Numbers) -> float:
            """Returns the total error, for budgeted squares as a norm of the model's gradient."""
            found = errors[rows, chosen].sum()
            return float(np.sqrt(found) if self.squared else found)

        return (
            f"layers under control: {costs[rows, choices].sum() / 1e6:.3f} MB at error {total(choices):.3g}, the "
            f"reference {costs[rows, reference].sum() / 1e6:.3f} MB at {total(reference):.3g}"
        )


def seconds_per_byte(sums: Doubles) -> Doubles | None:
    """Returns the slopes s_l of seconds = latency + s_l bytes of every layer l; None if times do not rise with bytes.

    ``sums[:, l]``: of xy, x x, x, y and 1 over l's samples of bytes x and seconds y. The latency, at least 0, is that
    of the line through all samples, so short exchange buckets do not count as expensive. s_l is fitted to l's samples
    and, with a tenth of the mean layer's weight, to that line, which decides for layers with too few bytes to show a
    slope.
    """
    xy, xx, x, y, count = sums.sum(axis=1).tolist()
    if not xx:
        return None
    spread = count * xx - x * x
    slope = (count * xy - x * y) / spread if spread > 1e-9 * count * xx else xy / xx
    latency = (y - slope * x) / count
    if latency < 0:
        latency, slope = 0.0, xy / xx
    if slope <= 0:
        return None
    pull = _PULL * xx / np.count_nonzero(sums[4])
    own: Doubles = (sums[0] - latency * sums[2] + pull * slope) / (sums[1] + pull)
    slopes: Doubles = np.maximum(own, own[own > 0].min())
    return slopes
