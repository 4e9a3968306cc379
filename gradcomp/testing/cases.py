"""The checks of the contract: a promise, the compressors that make it, and the simulated ranks that it runs on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradcomp.compress import Compressor, Flat
from gradcomp.core.layers import LayerSpec
from gradcomp.testing.simulation import Simulation

CAP = 256
LAYERS = [
    LayerSpec("empty.weight", (0,)),
    LayerSpec("one.bias", (1,), kind="bias"),
    LayerSpec("odd.weight", (37,)),
    LayerSpec("conv.weight", (5, 3, 3, 3)),
    LayerSpec("large.weight", (29, 31)),  # larger than CAP, so cut into slices
]
ODD, CONV, LARGE = 2, 3, 4
WORLDS = (1, 2, 3, 4, 7)


@dataclass(frozen=True)
class Row:
    """A compressor, and what the suite may expect of it.

    ``error``: bound on the error of a first step, in units of the largest gradient (if no stronger bound holds).
    ``unbiased``: the expected mean is the true one. ``constants``: equal values are exchanged exactly. ``draws``: the
    seed changes the mean. ``overflows``: sums of the largest numbers overflow. ``sized``: its bytes are a function of
    layers and level. ``waits``: values may stay in the residual until more arrive. ``products``: it sends matrix
    products, whose sums each backend of the kernels and instruction set may order differently. ``everything``: it sends
    all values and keeps no residual. ``by_part``: its codes depend on all of a layer's part within a chunk, and so the
    mean on the layout. ``partial``: it never reads some of the values, so it does not see whether they are finite.
    """

    compressor: Compressor
    error: float | None = None
    unbiased: bool = False
    constants: bool = True
    draws: bool = False
    overflows: bool = True
    sized: bool = True
    waits: bool = False
    products: bool = False
    everything: bool = False
    by_part: bool = False
    partial: bool = False

    @property
    def telescopes(self) -> bool:
        """Returns true if the applied values and the residual add up to the gradients."""
        traits = self.compressor.traits
        changed = traits.preconditions or traits.residual_decay != 1.0
        return traits.accounts and traits.keeps_residual and not changed

    def marked(self, ranks: Simulation, layer: int) -> list[bool]:
        """Returns by layer whether a value that is not finite marks it, if it is near the beginning of ``layer``."""
        first = ranks.ranks[0].pipeline.layout.buckets_of[layer][0]
        joins = isinstance(self.compressor, Flat)
        return [
            i == layer or (joins and first in buckets)
            for i, buckets in enumerate(ranks.ranks[0].pipeline.layout.buckets_of)
        ]

    @property
    def steady(self) -> bool:
        """Returns true if the compressor is the same in all steps."""
        return not self.compressor.changes

    @property
    def elsewhere(self) -> Compressor | None:
        """Returns the same compressor at another level, if it has levels."""
        match level := self.compressor.level:
            case None:
                return None
            case tuple():
                return self.compressor.with_level(level[::-1])
            case float():
                return self.compressor.with_level(min(1.0, 2 * level))
        return self.compressor.with_level(level + 2 if level < 7 else level - 2)


@dataclass(frozen=True)
class Check:
    """One promise. ``applies``: true for the rows that make it; ``arguments``: the values to check it with, by name."""

    run: Callable[..., None]
    applies: Callable[[Row], bool]
    arguments: Mapping[str, Sequence[Any]]

    def __call__(self, row: Row) -> bool:
        """Raises AssertionError if the row breaks the promise; returns False if it does not apply.

        It runs with one value of each argument.
        """
        if not self.applies(row):
            return False
        with np.errstate(over="ignore", invalid="ignore"):  # some gradients overflow, or are NaN
            self.run(row, **{name: values[len(values) // 2] for name, values in self.arguments.items()})
        return True


#: Every promise by its name.
CHECKS: dict[str, Check] = {}


def check(
    applies: Callable[[Row], bool] = lambda row: True, **arguments: Sequence[Any]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Registers a function as a promise in :data:`CHECKS`."""

    def decorate(run: Callable[..., None]) -> Callable[..., None]:
        CHECKS[run.__name__] = Check(run, applies, arguments)
        return run

    return decorate


def simulated(row: Row, layers: Sequence[LayerSpec], world: int, **options: Any) -> Simulation:
    """Returns a simulation of the row's compressor on ``world`` ranks."""
    return Simulation(layers, row.compressor, world, **options)


def after_a_step(row: Row) -> tuple[Simulation, Any]:
    """Returns three simulated ranks that have taken a step, and their state."""
    ranks = simulated(row, LAYERS, 3, slice_elements=CAP, reorder=False)
    ranks.step()
    return ranks, ranks.state()
