"""EF21 sends how much each rank's gradient differs from what all ranks know of it (Richtarik et al. 2021)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from gradcomp.compress.base import Compressor, Traits, zeros
from gradcomp.compress.bounds import ANY_LAYER, check_feedback_around
from gradcomp.compress.checks import check_number
from gradcomp.compress.messages import Broadcast, Bytes, Exchange, Floats, Gather, Message, Reduce, Reply, Sum
from gradcomp.compress.registry import register
from gradcomp.compress.wrappers.base import Wrapper
from gradcomp.core.errors import ConfigError
from gradcomp.core.layers import LayerSpec
from gradcomp.core.state import Begin
from gradcomp.kernels import replayed_calls
from gradcomp.kernels.codec import Codec, Group, Scratch
from gradcomp.kernels.segments import FLOAT32, FP32
from gradcomp.kernels.step import StepContext

Addresses = npt.NDArray[np.uint64]

EF21_OWN, EF21_MEAN, EF21_MOMENTUM = "ef21_own", "ef21_mean", "ef21_momentum"


@register("ef21")
@dataclass(frozen=True)
class EF21(Wrapper):
    """Send C(v - g_i), with C = ``inner``; the result is the mean over ranks of the sum of all that was ever sent.

    v = m v + (1 - m) x;  c_i = C(v - g_i);  g_i <- g_i + c_i;  g <- g + (1/N) sum over ranks of c_i;  result = g

    x is a rank's gradient, g_i what all ranks know of it, and g the mean of the g_i, the same on every rank. As
    gradients converge the differences vanish, and so does what C loses of them; a residual of error feedback does not
    vanish. A discarded step leaves g_i, g and v as they were. ``momentum``: m; 0 (default): v = x, the plain EF21. With
    momentum it is EF21-SGDM, for noisy gradients.

    C must be a contraction, as under error feedback. Its own feedback is turned off. Codes are never coded again: a
    quantiser's codes are gathered from all ranks and added, where the quantiser alone would use a reduction.

    Wire: as ``inner``; for a quantiser every rank's payload to all ranks, (N - 1) d bytes per rank.
    State: g_i and g, and v with momentum, float32 per layer: 16 or 24 bytes per element. All are zero at first.
    Errors: ConfigError for a momentum outside [0, 1), and for an ``inner`` that is a wrapper, loses nothing, votes, has
    momentum, clipping, a schedule or a decay of its own, or diverges under feedback.
    Source: Richtarik et al. 2021, Algorithm 2; momentum: Fatkhullin et al. 2023, Algorithm 1. Differs: g_i and v are
    zero at first, where the papers begin with a first gradient.
    """

    momentum: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("momentum", self.momentum, "[0, 1)")
        own, name = self.inner.traits, self.inner.to_string()
        if isinstance(self.inner, Wrapper) or own.preconditions or self.inner.changes:
            raise ConfigError(
                f"wrappers, momentum, clipping and schedules go around ef21, not into it: {name}"
            )
        if own.exact or own.learns or not own.accounts or own.residual_decay != 1.0:
            raise ConfigError(
                f"ef21 takes a compressor that loses something, decays nothing and learns nothing, got {name}"
            )
        check_feedback_around(name, self.inner.distortion(ANY_LAYER))

    @cached_property
    def traits(self) -> Traits:
        """Return traits without a residual, since the result is not the mean of what a step sends."""
        return Traits(accounts=False, whole_model=self.inner.traits.whole_model)

    def dense(self, exact: Compressor) -> Compressor:
        """Return ``exact``: nothing is remembered while training warms up."""
        return exact

    def fields(self, layer: LayerSpec, seed: int) -> dict[str, tuple[int, Begin]]:
        """Return g_i, g and v, and the fields of the inner compressor."""
        names = (EF21_OWN, EF21_MEAN, EF21_MOMENTUM) if self.momentum else (EF21_OWN, EF21_MEAN)
        return {**self.inner.fields(layer, seed), **{name: (layer.size, zeros(layer.size)) for name in names}}

    def exchange(self, group: Group, context: StepContext) -> Exchange:
        """Run the inner exchange on the differences, with a Gather in place of a Reduce."""
        memory = group.scratch.once("ef21", lambda: _Memory(self, group))
        exchange = self.inner.exchange(
            memory.group, replace(context, scale=1.0, unscale=1.0, decay=1.0, active=0)
        )
        first = next(exchange)
        if isinstance(first, Reduce):
            reply = yield memory.begin_with(
                memory.everyone(first.codec, context), group, context, self.momentum
            )
            divisor = context.world if context.average else 1.0  # g is that of all ranks
            return memory.finish(group, context, divisor, memory.added(first.codec, reply))
        reply = yield memory.begin_with(first, group, context, self.momentum)
        try:
            while True:
                with replayed_calls.at_once():  # the mean is read at once
                    message = exchange.send(reply)
                reply = yield message
        except StopIteration as end:
            return memory.finish(group, context, 1.0, end.value)


class _Memory:
    """Hold the arrays that the group shares with that of ``inner``: difference, loss and mean, layer after layer."""

    PARTS: ClassVar[tuple[str, ...]] = ("difference", "lost", "mean")

    def __init__(self, ef21: EF21, group: Group) -> None:
        rows, size = len(group.table), group.elements
        ends = np.cumsum(group.table["length"].astype(np.int64))
        self._places = ends - group.table["length"]
        vectors = {name: group.scratch.vector(f"ef21.{name}", size) for name in self.PARTS}
        self._mean = vectors["mean"]
        at = {
            name: np.uint64(v.address) + (4 * self._places).astype(np.uint64) for name, v in vectors.items()
        }
        table = group.table.copy()
        table["dtype"], table["residual"] = FLOAT32, 0
        table["gradient"], table["next_residual"], table["output"] = at["difference"], at["lost"], at["mean"]
        self.group = replace(
            group,
            compressor=ef21.inner,
            table=table,
            feedback=True,  # so that the loss is written; no residual is read
            decay=1.0,
            follows_rate=False,
            prepared=False,
            scratch=Scratch(group.device),
        )
        self._at = at
        self._ones = np.ones(rows, dtype=np.float32)

    def begin_with(
        self, message: Sum | Gather | Broadcast, group: Group, context: StepContext, momentum: float
    ) -> Message:
        """Return the first message, changed to write the differences before they are encoded."""

        def write(view: Floats) -> Bytes | tuple[Bytes, int]:
            with replayed_calls.at_once():  # so that the flags are those of this step
                found = self._differ(group, context, momentum)
                both = message.write_at_once if isinstance(message, Gather) else message.write
                written = both(view)
            if isinstance(written, tuple):
                return written[0] | found, written[1]
            return written | found

        if isinstance(message, Gather):
            return replace(message, write=write, select=None)  # type: ignore[arg-type]  # of the message's own kind
        return replace(message, write=write)  # type: ignore[arg-type]

    def _differ(self, group: Group, context: StepContext, momentum: float) -> Bytes:
        """Write difference <- v - g_i, and the next v; return the rows that are not finite."""
        table, flags = group.inputs.copy(), np.zeros(len(group.table), dtype=np.uint8)
        factors = context.factors(len(table))
        if momentum:
            table["residual"], table["next_residual"] = _both(group, context, EF21_MOMENTUM)
            group.device.kernels.contribute(
                table, flags, np.float32(1.0 - momentum) * factors, decay=momentum
            )
            table["gradient"], table["dtype"], factors = table["next_residual"].copy(), FLOAT32, self._ones
        table["residual"] = _both(group, context, EF21_OWN)[0]
        table["next_residual"] = self._at["difference"]
        group.device.kernels.contribute(table, flags, factors, decay=-1.0)
        return flags

    def everyone(self, codec: Codec, context: StepContext) -> Gather:
        """Return a Gather of the codes of the differences, in place of a Reduce."""
        table = self.group.table
        sizes = codec.wire_bytes(table)
        table["payload"] = np.cumsum(sizes) - sizes

        def write(view: Bytes) -> tuple[Bytes, int]:
            inputs, flags = self.group.inputs, np.zeros(len(table), dtype=np.uint8)
            inputs["payload"] = table["payload"]
            codec.encode(self.group.device, inputs, view, flags, context.draw)
            return flags, len(view)

        return Gather(int(sizes.sum()), write)

    def added(self, codec: Codec, reply: Reply) -> Bytes:
        """Write mean <- every rank's codes, added in rank order; return the rows that are not finite."""
        table, flags = self.group.table, reply.flags.copy()
        first, *others = reply.data
        codec.decode(self.group.device, table, first, flags)
        for payload in others:
            codec.add(self.group.device, table, payload)
        return flags

    def finish(self, group: Group, context: StepContext, divisor: float, flags: Bytes) -> Bytes:
        """Write the next g_i and g, and g to the outputs; return the rows that are not finite."""
        ignored = np.zeros(len(flags), dtype=np.uint8)
        table = self.group.table.copy()

        def add(to: Addresses, gradient: Addresses, factor: float, residual: Addresses, decay: float) -> None:
            table["next_residual"], table["gradient"], table["residual"] = to, gradient, residual
            group.device.kernels.contribute(table, ignored, np.float32(factor) * self._ones, decay=decay)

        difference, lost, mean = (self._at[name] for name in self.PARTS)
        old, new = _both(group, context, EF21_OWN)
        add(difference, difference, 1.0, lost, -1.0)  # what was sent
        add(new, difference, 1.0, old, 1.0)
        old, new = _both(group, context, EF21_MEAN)
        add(mean, mean, 1.0 / divisor, old, 1.0)
        add(new, mean, 1.0, np.zeros_like(old), 1.0)

        flags = flags.copy()
        group.table["payload"] = 4 * self._places
        total = self._mean.read(0, group.elements)
        Codec(FP32).decode(
            group.device, group.table, total.view(np.uint8), flags, scale=context.unscale * context.share
        )
        return flags


def _both(group: Group, context: StepContext, name: str) -> tuple[Addresses, Addresses]:
    """Return the addresses of a field's current values, and of its next values."""
    assert context.fields is not None, "state is there when a step runs"
    return context.fields[name].addresses(group.layers, group.table["start"])
