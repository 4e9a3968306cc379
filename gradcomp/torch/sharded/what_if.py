"""What-if runs of sharded models: ratios of fake compression for weights and for gradients take turns."""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import perf_counter

import torch

from gradcomp.compress import Fake, Identity
from gradcomp.control.what_if import FIRST_STEPS, Point, Rounds, curve
from gradcomp.core.layers import LayerSpec
from gradcomp.core.what_if import NOTHING, Ratios, shown
from gradcomp.exchange.exchanger import Exchanger
from gradcomp.exchange.requests import Blocks, Request

logger = logging.getLogger("gradcomp")

#: As many as :class:`gradcomp.WhatIf` has by default.
BLOCK_STEPS = 10


def sent_of(size: int, ratio: float) -> int:
    """Return how many elements of a rank's block travel."""
    return min(-int(-size // ratio), size)


def part_of(
    kind: str, name: str, size: int, world: int, dtype: str, ratio: float, *, average: bool
) -> Request:
    """Return the request for the first 1/ratio of every rank's block of ``size`` elements, uncompressed."""
    sent = sent_of(size, ratio)
    layer = LayerSpec(name, (sent * world,), dtype)
    borders = tuple(sent * rank for rank in range(world + 1))
    return Request(kind, (layer,), (Identity(),), (borders,), average, name, Blocks(size, (0,)))


def zero_the_rest(target: torch.Tensor, size: int, ratio: float) -> None:
    """Set to 0 what did not travel of the blocks of ``size`` elements in ``target``."""
    if size:
        target.view(-1, size)[:, sent_of(size, ratio) :].zero_()


class Grid:
    """Gives every step its pair of ratios, measures steps, and logs them on rank 0 as Markov 2024, Table C.2, does.

    With one list of ratios, weights and gradients have the same one (Figure C.1). The last pair is 2**30 for both, so
    that the network costs nothing but latency. Pairs take turns in blocks, see :class:`Rounds`. A step begins with the
    first gather after the optimizer has stepped. ``exchanger()`` compares times, among ``world`` ranks; ``sent_bytes``
    returns the bytes that this rank has sent so far. ``says``: this rank logs.
    """

    def __init__(
        self,
        ratios: Ratios,
        world: int,
        rank: int,
        exchanger: Callable[[], Exchanger],
        sent_bytes: Callable[[], int],
        *,
        says: bool,
    ) -> None:
        self._ratios = ratios
        pairs = (
            [(w, g) for w in ratios.weights for g in ratios.gradients]
            if ratios.is_grid
            else [(ratio, ratio) for ratio in ratios.gradients]
        )
        self.pairs = list(dict.fromkeys([*pairs, (NOTHING, NOTHING)]))
        self.rounds = Rounds(len(self.pairs), BLOCK_STEPS, world, rank)
        self._exchanger, self._sent_bytes, self._says = exchanger, sent_bytes, says
        self._sent = [0.0] * len(self.pairs)
        self._step: int | None = None
        self._began, self._before = 0.0, 0
        self.fakes = self._fakes(0)

    def _fakes(self, step: int) -> tuple[Fake, Fake]:
        weights, gradients = self.pairs[self.rounds.variant(step)]
        return Fake(weights), Fake(gradients)

    @property
    def points(self) -> list[Point]:
        """Return what was measured so far, by pair."""
        labels = (f"{shown(w)} x {shown(g)}" if self._ratios.is_grid else shown(g) for w, g in self.pairs)
        return list(map(Point, labels, self._sent, self.rounds.seconds))

    def begin(self, step: int) -> None:
        """Begin a step, unless it has begun. Collective after a block: all ranks call it before the same gather."""
        if step == self._step:
            return
        rounds, now, sent = self.rounds, perf_counter(), self._sent_bytes()
        rounds.begin(step)
        if self._step is not None and step == self._step + 1:
            rounds.took(self._step, now - self._began)
            self._sent[rounds.variant(self._step)] = float(sent - self._before)
        self._step, self._began, self._before = step, now, sent
        if rounds.ends_block(step):
            sums = rounds.row()
            self._exchanger().allreduce(sums)
            if rounds.receive(step, sums) and self._says:
                logger.info(self.table() if self._ratios.is_grid else curve(self.points, rounds.world))
        self.fakes = self._fakes(step)

    def table(self) -> str:
        """Return the median step times in milliseconds, a row for each ratio of weights."""
        of = {pair: f"{1e3 * point.median:.1f}" for pair, point in zip(self.pairs, self.points, strict=True)}
        gradients = self._ratios.gradients
        lines = [
            f"what-if, {self.rounds.world} ranks: ms a step (fake compression: training is worthless)",
            f"{'weights':>8} | ratio of gradients",
            " " * 8 + "".join(f"{shown(ratio):>10}" for ratio in gradients),
            *(f"{shown(w):>8}" + "".join(f"{of[w, g]:>10}" for g in gradients) for w in self._ratios.weights),
            f"left when the network costs nothing but latency: {of[NOTHING, NOTHING]}",
        ]
        return "\n".join(lines)

    @property
    def steps(self) -> int:
        """Return how many steps a first table takes."""
        return FIRST_STEPS + len(self.pairs) * BLOCK_STEPS + 1
