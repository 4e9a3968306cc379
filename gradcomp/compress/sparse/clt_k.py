"""CLT-k sends the elements of all ranks that are largest on one rank (Chen et al. 2020, ScaleCom)."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from gradcomp.compress.base import Traffic, Traits, zeros
from gradcomp.compress.checks import check_flag, check_whole, check_word
from gradcomp.compress.messages import Broadcast, Bytes, Exchange, Message, Reply
from gradcomp.compress.registry import register
from gradcomp.compress.sparse import payload
from gradcomp.compress.sparse.drawn import Summed
from gradcomp.compress.sparse.payload import CODINGS, KEPT, IndexFormat, KeptIndices, Selection
from gradcomp.core.layers import LayerSpec
from gradcomp.core.state import Begin
from gradcomp.kernels.codec import Group, Sizes, Table
from gradcomp.kernels.step import StepContext


@dataclass(frozen=True, eq=False)
class Shared:
    """Hold a selection without values, the same on all ranks, and what is known of values that are not finite.

    ``flags``: rows that some rank has reported as not finite; where indices are kept, nothing may have been reported
    yet. ``prepare``: writes p to the next residuals if that is not done, and returns the flags of this rank's rows. It
    is to be called once.
    """

    chosen: Selection
    flags: Bytes
    prepare: Callable[[], Bytes]


class Rider:
    """Add data in front of the leader's indices, and work to that round: this base class adds none.

    ``nbytes``: the size of the data.
    """

    nbytes: int = 0

    def lead(self, group: Group, chosen: Selection, flags: Bytes, view: Bytes) -> None:
        """Write the data, on the leader, which has selected."""

    def follow(self, group: Group, context: StepContext, flags: Bytes) -> None:
        """Write p to the next residuals, on the other ranks."""
        factors = context.factors(len(group.table))
        group.device.kernels.contribute(group.inputs, flags, factors, decay=context.decay)

    def read(self, data: Bytes) -> None:
        """Read the ``nbytes`` that have arrived, on all ranks. ValueError if they are impossible."""


@register("clt_k")
@dataclass(frozen=True)
class CLTk(Summed):
    """Send the k = round(density n) elements of each layer, at least one, whose p is largest on this step's leader.

    This is cyclic local top-k: in step t rank t mod N leads. It selects the k largest |p| of each layer, ties by lower
    index, and broadcasts their indices; then all ranks' p at these indices are summed. e' is 0 at these indices, and p
    elsewhere. The level is the density.

    With ``refresh`` = s, indices are kept for a period of s steps: rank (t div s) mod N leads in all of it, and selects
    in its first step, or in the first that is accepted.

    It assumes that residuals are similar on all ranks: then one rank's largest elements are nearly those of the mean.
    ``indices``: their coding, as in :class:`Sparse`.

    Wire: a Broadcast of the leader's coded indices, whose size depends on the coding, unless indices are kept; then one
    Sum of k values, 8k (N - 1) / N bytes per rank with a ring. TopK gathers N lists where this sums one.
    State: a residual per layer, with ``feedback``; with ``refresh`` > 1, 16 bytes per index and 8 per layer.
    Errors: ConfigError for a density outside (0, 1]; WireFormatError for indices that are out of range or not
    ascending; StateError for such indices in a checkpoint.
    Source: Chen et al. 2020 (ScaleCom) as Abrahamyan et al. 2021 describe it, section II. Differs: there is no low-pass
    filter on the residuals, which they do not mention; ``refresh``.
    """

    indices: str = field(default="auto", kw_only=True)
    feedback: bool = field(default=True, kw_only=True)
    refresh: int = field(default=1, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_word("indices", self.indices, CODINGS)
        check_flag("feedback", self.feedback)
        check_whole("refresh", self.refresh)

    @cached_property
    def traits(self) -> Traits:
        """Return a residual by default, because a selection is biased; selections are made from p in memory."""
        return Traits(keeps_residual=self.feedback, contributes=True)

    def fields(self, layer: LayerSpec, seed: int) -> dict[str, tuple[int, Begin]]:
        """Return the fields of the base, and with ``refresh`` the one that keeps indices."""
        count = self.sent_of(layer)
        size = 2 * count + 1 if count else 0  # see KeptIndices
        kept = {KEPT: (size, zeros(size))} if self.refresh > 1 else {}
        return {**super().fields(layer, seed), **kept}

    def wire_bytes(self, group: Group) -> Sizes:
        """Return the leader's bytes when it selects: indices, unless they are deflated, and values."""
        return super().wire_bytes(group) + self.format(group.table).row_bytes(self.limits(group.table))

    def traffic(self, group: Group) -> Traffic:
        """Return the indices of one step in ``refresh``, and a sum of values."""
        led = self.format(group.table).row_bytes(self.limits(group.table)) / self.refresh
        return Traffic(led, np.zeros_like(led), super().wire_bytes(group).astype(np.float64))

    def format(self, table: Table) -> IndexFormat:
        """Return the format of the leader's indices."""
        return IndexFormat(table["length"].astype(np.int64), self.indices)

    def leader(self, context: StepContext) -> int:
        """Return the rank that selects in this step."""
        return context.draw.step // self.refresh % context.world

    def selection_of(self, group: Group) -> Selection:
        """Return the group's only selection, which every step fills."""
        return group.scratch.once("chosen", lambda: Selection.allocate(self.limits(group.table)))

    def exchange(self, group: Group, context: StepContext) -> Exchange:
        """Request one Broadcast, unless indices are kept, and one Sum."""
        shared = yield from self.share_indices(group, context)
        return (yield from self.sum_at(group, context, shared.chosen, shared.prepare))

    def share_indices(
        self, group: Group, context: StepContext, rider: Rider | None = None
    ) -> Generator[Message, Reply, Shared]:
        """Return the selection of this step.

        It takes one Broadcast, unless indices are kept and a rider adds no data.
        """
        form = group.scratch.once("format", lambda: self.format(group.table))
        chosen = self.selection_of(group)
        most = group.scratch.once("most", lambda: form.most_bytes(chosen.counts, fixed=True))
        leader, rider = self.leader(context), rider or Rider()
        flags = np.zeros(len(group.table), dtype=np.uint8)
        kept, stays = None, False
        mark = payload.mark_of(context.draw.step // self.refresh)
        if self.refresh > 1 and context.fields is not None:
            kept = group.scratch.once("kept", lambda: KeptIndices.of(group, chosen))
            stays = kept.load(group, context, mark, chosen)

        def write(view: Bytes) -> tuple[Bytes, int]:
            if context.draw.rank != leader:
                rider.follow(group, context, flags)
                return flags, 0
            (_take_kept if stays else _select)(group, context, flags, chosen)
            rider.lead(group, chosen, flags, view[: rider.nbytes])
            return flags, rider.nbytes if stays else form.encode(chosen, view, rider.nbytes)

        def prepare() -> Bytes:
            write(np.zeros(0, np.uint8))
            return flags

        if stays and not rider.nbytes:
            shared = Shared(chosen, np.zeros_like(flags), prepare)
        else:
            length = rider.nbytes if stays else rider.nbytes + most
            reply = yield Broadcast(length, write, leader, fixed=stays or not form.deflated)
            with payload.sent_by(leader):
                if len(reply.data) < rider.nbytes:
                    raise ValueError(
                        f"{len(reply.data)} bytes, fewer than the {rider.nbytes} in front of the indices"
                    )
                rider.read(reply.data[: rider.nbytes])
                if not stays:
                    form.decode(reply.data[rider.nbytes :], chosen)
            shared = Shared(chosen, reply.flags, lambda: flags)
        if kept is not None:
            kept.store(group, context, mark, chosen)
        return shared


def _select(group: Group, context: StepContext, flags: Bytes, chosen: Selection) -> None:
    """Select the largest |p| on the leader; write p to the next residuals."""
    # Zeros are selected too, because other ranks' elements at these indices need not be 0.
    factors = context.factors(len(group.table))
    group.device.kernels.select_top(
        group.inputs, flags, factors, chosen.counts, *chosen.arrays, decay=context.decay, zeros=True
    )


def _take_kept(group: Group, context: StepContext, flags: Bytes, chosen: Selection) -> None:
    """Take the values of p at indices that are kept, on the leader; write p to the next residuals."""
    group.device.kernels.contribute(
        group.inputs, flags, context.factors(len(group.table)), decay=context.decay
    )
    group.device.kernels.take(group.inputs, chosen.offsets, chosen.counts, chosen.indices, chosen.values)
