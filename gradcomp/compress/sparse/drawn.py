"""Compressors that send the same elements on all ranks: RandomK and RandomBlock, drawn from the shared seed."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt

from gradcomp.compress.base import Traits
from gradcomp.compress.bounds import Distortion
from gradcomp.compress.checks import check_flag
from gradcomp.compress.messages import Bytes, Exchange, Sum
from gradcomp.compress.registry import register
from gradcomp.compress.sparse.base import ByDensity, keep_errors
from gradcomp.compress.sparse.payload import Selection
from gradcomp.core.errors import ConfigError
from gradcomp.core.layers import LayerSpec
from gradcomp.kernels.codec import Draw, Group, Sizes, Table
from gradcomp.kernels.devices import HOST
from gradcomp.kernels.philox import strata
from gradcomp.kernels.step import StepContext

Floats = npt.NDArray[np.float32]

Indices = npt.NDArray[np.uint32]
INDEX_RANK: Final = 0xFFFFFFFE
"""This number stands for the rank in the random counter of these draws; no rank and no chunk owner has it."""


@dataclass(frozen=True)
class Summed(ByDensity):
    """Base of the compressors that send k = round(density n) elements of each layer, at least one, equal on all ranks.

    p = scale g + decay e on every rank; indices S that all ranks know; mean = (1/N) sum over ranks of p restricted to
    S; e' = p outside of S, and inside p minus what was sent, which is 0 unless values are weighted. The level is the
    density.

    The last message is a Sum of 4k bytes per layer: 8k (N - 1) / N bytes per rank with a ring, however many ranks.
    Layers are never cut into slices.
    """

    @cached_property
    def traits(self) -> Traits:
        return Traits(contributes=True)

    def wire_bytes(self, group: Group) -> Sizes:
        return 4 * self.limits(group.table)

    def weigh(self, group: Group, values: Floats) -> Floats:
        """Return the values that are sent for the values of p at the selected indices."""
        return values

    def sum_at(
        self, group: Group, context: StepContext, chosen: Selection, prepare: Callable[[], Bytes]
    ) -> Exchange:
        """Request one Sum of all ranks' values at the indices of ``chosen``.

        ``prepare`` writes those indices, and p to the next residuals; it returns the rows that are not finite.
        """
        table = group.inputs

        def write(view: Floats) -> Bytes:
            flags = prepare()
            group.device.kernels.take(table, chosen.offsets, chosen.counts, chosen.indices, chosen.values)
            with np.errstate(all="ignore"):
                view[:] = self.weigh(group, chosen.values)
                keep_errors(group, chosen, chosen.values - view)
            view[np.repeat(flags != 0, chosen.counts)] = np.nan
            return flags

        reply = yield Sum(len(chosen.values), write)
        flags = reply.flags.copy()
        # The indices of a row are the same on all ranks, so there is one list per row.
        group.device.kernels.scatter_mean(
            *(group.table, flags, chosen.offsets[None], chosen.counts[None], chosen.indices, reply.data),
            divisor=context.divisor,
            scale=context.unscale,
        )
        return flags


def random_indices(
    lengths: Sizes, counts: Sizes, layers: Indices, seed: int, step: int
) -> tuple[Sizes, Indices]:
    """Draw counts[i] distinct indices below lengths[i] for every row, ascending, one in each of as many strata.

    Stratum j of n elements and k draws is [floor(j n / k), floor((j + 1) n / k)); the draw is a 32-bit word at the
    random counter (j // 4, layer hash, step, 2**32 - 2), as `gradcomp.kernels.philox.draw_indices` says.

    Args:
        lengths: elements n of each row, in 0..2**32 - 1.
        counts: draws k of each row, in 0..n.
        layers: hash of each row's layer.
        seed: 64 bits.
        step: 32 bits.

    Returns:
        Where each row's indices begin, and the indices of all rows.
    """
    offsets = np.cumsum(counts) - counts
    drawn = np.empty(int(counts.sum()), dtype=np.uint32)
    layers = np.ascontiguousarray(layers)
    HOST.kernels.draw_indices(lengths, counts, layers, offsets, drawn, seed=seed, step=step, rank=INDEX_RANK)
    return offsets, drawn


def random_blocks(
    lengths: Sizes, counts: Sizes, layers: Indices, seed: int, step: int
) -> tuple[Sizes, Indices]:
    """Draw a block of counts[i] consecutive indices below lengths[i] for every row, ascending.

    Its first element is the one that :func:`random_indices` draws for a count of 1. A block that reaches the end of the
    row continues at element 0, so that every element has probability k / n. Arguments and result are those of
    :func:`random_indices`.
    """
    starts = np.zeros(len(counts), dtype=np.int64)
    starts[counts > 0] = random_indices(lengths, np.minimum(counts, 1), layers, seed, step)[1]
    offsets = np.cumsum(counts) - counts
    wrapped = np.maximum(starts + counts - lengths, 0)  # elements at the beginning, first in order
    # Index j of all rows is j - offset among those, and start + j - offset - wrapped after them.
    shifts = np.stack((-offsets, starts - wrapped - offsets), axis=1).reshape(-1)
    pieces = np.stack((wrapped, counts - wrapped), axis=1).reshape(-1)
    drawn = np.arange(int(counts.sum())) + np.repeat(shifts, pieces)
    return offsets, drawn.astype(np.uint32)


@dataclass(frozen=True)
class Drawn(Summed):
    """Base of the compressors whose indices are a function of seed, step and layer, so that no index is sent.

    ``scaled``: send p over its probability of being sent, so that the expected mean is the true one. ``feedback``: keep
    what was not sent; by default it is on unless ``scaled``.
    """

    density: float = 0.1
    scaled: bool = False
    feedback: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flag("scaled", self.scaled)
        check_flag("feedback", self.feedback, or_none=True)
        if self.scaled and self.feedback:
            raise ConfigError(
                "feedback of scaled values grows without bound, because more is sent than there is: use one of the two"
            )

    @cached_property
    def traits(self) -> Traits:
        """Return a residual as ``feedback`` says; by default there is one unless ``scaled``."""
        keeps = not self.scaled if self.feedback is None else self.feedback
        return Traits(keeps_residual=keeps, contributes=True)

    @abstractmethod
    def draw(self, table: Table, draw: Draw) -> Indices:
        """Draw the indices of all rows, ascending in each."""

    @abstractmethod
    def weights(self, table: Table) -> Floats:
        """Return one over the probability of being sent, for every element that is sent."""

    def weigh(self, group: Group, values: Floats) -> Floats:
        """Return the values times their weights, if they are ``scaled``."""
        if not self.scaled:
            return values
        weighed: Floats = values * group.scratch.once("weights", lambda: self.weights(group.table))
        return weighed

    def exchange(self, group: Group, context: StepContext) -> Exchange:
        chosen = group.scratch.once("chosen", lambda: Selection.allocate(self.limits(group.table)))
        table = group.inputs

        def prepare() -> Bytes:
            flags = np.zeros(len(table), dtype=np.uint8)
            group.device.kernels.contribute(table, flags, context.factors(len(table)), decay=context.decay)
            chosen.indices[:] = self.draw(table, context.draw)
            return flags

        return (yield from self.sum_at(group, context, chosen, prepare))


@register("random_k")
@dataclass(frozen=True)
class RandomK(Drawn):
    """Send k = round(density n) random elements of each layer, at least one, the same on all ranks.

    Stratum j of k is [floor(j n / k), floor((j + 1) n / k)); one element of each is drawn. By default the selection is
    biased and has error feedback; with ``scaled`` an element from a stratum of s is sent as s p, which is unbiased and
    has no residual. The level is the density.

    Wire: one Sum of k values, 8k (N - 1) / N bytes per rank with a ring; no indices, since all ranks draw them from the
    shared seed.
    State: a residual per layer, unless ``scaled``.
    Errors: ConfigError for a density outside (0, 1], or for ``scaled`` with ``feedback``.
    Source: Tyagi and Swany 2023 (Random-k); Vogels et al. 2019, Table 4 (Random K); Markov 2024, section 2.2.3
    (rand-K). Differs: draws are stratified, where an unstructured random subset may leave long stretches out. An
    element has the same probability of being sent (k / n, up to the rounding of strata), sums have less variance, and
    indices are ascending and distinct by construction.
    """

    def distortion(self, layer: LayerSpec) -> Distortion:
        """Bound the loss by the largest stratum, of s elements: 1 - 1/s, or the variance s - 1 if ``scaled``."""
        stratum = -(-layer.size // max(self.sent_of(layer), 1))
        if self.scaled:
            return Distortion(max(stratum - 1.0, 0.0), True)
        return Distortion(1.0 - 1.0 / max(stratum, 1))

    def draw(self, table: Table, draw: Draw) -> Indices:
        """Draw one index in each stratum."""
        return random_indices(_lengths(table), self.limits(table), table["layer"], draw.seed, draw.step)[1]

    def weights(self, table: Table) -> Floats:
        """Return the size of the stratum of every element."""
        return strata(_lengths(table), self.limits(table))[1].astype(np.float32)


def _lengths(table: Table) -> Sizes:
    lengths: Sizes = table["length"].astype(np.int64)
    return lengths


@register("random_block")
@dataclass(frozen=True)
class RandomBlock(Drawn):
    """Send a block of k = round(density n) consecutive elements of each layer, at least one, the same on all ranks.

    The first element is drawn from the shared seed, uniform in 0..n - 1; a block that reaches the end of the layer
    continues at its beginning. By default the selection is biased and has error feedback; with ``scaled`` every element
    is sent as (n / k) p, which is unbiased and has no residual. The level is the density.

    At most two contiguous parts of a layer are read, so this is the cheapest way to send few elements. It also trains
    worst (Vogels et al. 2019, Table 4: 87.8% where Random K reaches 92.6%), because all elements of a block wait
    equally long.

    Wire: one Sum of k values, 8k (N - 1) / N bytes per rank with a ring; no indices.
    State: a residual per layer, unless ``scaled``.
    Errors: ConfigError for a density outside (0, 1], or for ``scaled`` with ``feedback``.
    Source: Vogels et al. 2019, Table 4 and Figure 1 (Random Block). Differs: blocks wrap around, so that every element
    has the same probability k / n of being sent.
    """

    def distortion(self, layer: LayerSpec) -> Distortion:
        """Return 1 - k/n as the bound, or the variance n/k - 1 if ``scaled``."""
        share = self.sent_of(layer) / max(layer.size, 1)
        if not share:
            return Distortion(0.0, self.scaled)
        return Distortion(1.0 / share - 1.0, True) if self.scaled else Distortion(1.0 - share)

    def draw(self, table: Table, draw: Draw) -> Indices:
        """Draw one block of each layer."""
        return random_blocks(_lengths(table), self.limits(table), table["layer"], draw.seed, draw.step)[1]

    def weights(self, table: Table) -> Floats:
        """Return n / k for all elements of a layer."""
        counts = self.limits(table)
        shares = table["length"].astype(np.float64) / np.maximum(counts, 1)
        return np.repeat(shares.astype(np.float32), counts)
