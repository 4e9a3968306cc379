"""Sparse compressors share this: select on every rank, gather what was selected, scatter its mean."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import ClassVar, Final

import numpy as np
import numpy.typing as npt

from gradcomp.compress.base import Coded, Compressor, Traits
from gradcomp.compress.bounds import ANY_LAYER, Distortion, check_feedback_around
from gradcomp.compress.checks import check_flag, check_number, check_word
from gradcomp.compress.messages import Bytes, Exchange, Floats, Gather
from gradcomp.compress.quantise.cast import Cast
from gradcomp.compress.registry import from_string
from gradcomp.compress.sparse.payload import CODINGS, Selection, SparseFormat
from gradcomp.core.errors import ConfigError
from gradcomp.core.layers import LayerSpec
from gradcomp.core.plan import Level
from gradcomp.kernels import replayed_calls
from gradcomp.kernels.codec import Group, Sizes, Table
from gradcomp.kernels.devices import HOST, Device
from gradcomp.kernels.step import StepContext

#: Only zeros are below this magnitude.
LEAST_MAGNITUDE: Final = np.finfo(np.float32).smallest_subnormal


def elements_at(density: float | npt.NDArray[np.float64], lengths: Sizes) -> Sizes:
    """Return the number of elements at a density: round(density n), at least one of a layer that has any."""
    counts = np.rint(density * lengths).astype(np.int64)
    limited: Sizes = np.minimum(np.maximum(counts, 1), lengths)
    return limited


@dataclass(frozen=True)
class ByDensity(Compressor):
    """Base of the compressors that select round(``density`` n) elements of a layer: their level is the density."""

    level_field: ClassVar[str | None] = "density"

    density: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("density", self.density, "(0, 1]")

    def fill(self, table: Table, level: Level) -> None:
        """Write k, the number of elements to select, into the column of the level."""
        check_number("density", level, "(0, 1]")
        assert isinstance(level, int | float), "checked"
        table["level"] = elements_at(float(level), table["length"].astype(np.int64))
        table["bucket_size"] = 1

    def sent_of(self, layer: LayerSpec) -> int:
        """Return k, the number of elements that are selected of this layer."""
        return int(elements_at(self.density, np.array([layer.size]))[0])

    def limits(self, table: Table) -> Sizes:
        """Return k, the number of elements that are sent of each row."""
        counts: Sizes = table["level"].astype(np.int64)
        return counts


@dataclass(frozen=True)
class Sparse(Compressor):
    """Base of the compressors that send some elements of each layer, with their positions.

    p = scale g + decay e on every rank; a selection S of its elements; mean = (1/N) sum over ranks of p restricted to
    S; e' = p outside of S, and inside what the coding of values lost.

    ``values``: how selected values travel, any coded compressor: exact (default), ``Cast("bfloat16")``,
    ``Quantize(4)``, ``OneBit()`` (one mean per sign, as in RedSync). ``indices``: ``auto`` (the smallest coding by
    formula for the layer's size and count, see docs/wire-format.md), ``raw`` (32 bits), ``packed``, ``bitmap``,
    ``deflate`` (as in Abrahamyan et al. 2021, section V-A). ``feedback``: keep what was not sent; ConfigError for
    ``values`` whose coding would make the residual grow.

    Layers are never cut into slices: a selection is the whole layer's. Every rank receives N - 1 payloads.
    """

    values: Coded = field(default_factory=lambda: Cast("float32"), kw_only=True)
    indices: str = field(default="auto", kw_only=True)
    feedback: bool = field(default=True, kw_only=True)

    #: True if only kernels touch what ``select`` selects, so that it may stay on a device.
    by_kernels = False

    #: True if ``select`` only calls kernels, none of which needs what another one leaves on the host.
    in_one_call = False

    def __post_init__(self) -> None:
        if isinstance(self.values, str):
            object.__setattr__(self, "values", from_string(self.values))
        if (
            not isinstance(self.values, Coded)
            or self.values.traits.momentum
            or isinstance(self.values.level, tuple)
            or (self.values.traits.keeps_residual and self.values.traits.residual_decay != 1)
        ):
            raise ConfigError(f"values must be a cast or a quantiser, got {self.values!r}")
        check_word("indices", self.indices, CODINGS)
        check_flag("feedback", self.feedback)
        if self.feedback:
            name, remedy = f"values=[{self.values.to_string()}]", "Use more bits, or values=[one_bit]"
            check_feedback_around(name, self.values.distortion(ANY_LAYER), remedy)

    def distortion_of_largest(self, count: int, layer: LayerSpec, share: float | None = None) -> Distortion:
        """Bound the loss if the ``count`` largest elements are sent, which hold at least count / n of the energy.

        ``share`` is that part of the energy where it is another one.
        """
        coded = self.values.distortion(replace(layer, shape=(count,))) or Distortion(0.0)
        share = count / max(layer.size, 1) if share is None else share
        bound = max(coded.bound, 1.0 - share * (1.0 - coded.bound))
        return Distortion(bound, selects=coded.bears_feedback)

    @property
    def fixed(self) -> bool:
        """Return whether a layer's size and level alone decide how many elements are sent."""
        return False

    @cached_property
    def traits(self) -> Traits:
        """Return a residual by default, because a selection is biased; selections are made from p in memory."""
        return Traits(keeps_residual=self.feedback, contributes=True)

    @abstractmethod
    def limits(self, table: Table) -> Sizes:
        """Return how many elements of each row are sent: exactly if :attr:`fixed`, else at most."""

    @abstractmethod
    def select(self, group: Group, context: StepContext, chosen: Selection, flags: Bytes) -> None:
        """Write p to the rows' next residuals, and write the selection; flag rows that are not finite."""

    def format(self, table: Table, device: Device = HOST) -> SparseFormat:
        """Return the payload format of a group with this table, which lies on ``device``."""
        device = device if self.by_kernels else HOST
        return SparseFormat(table, self.limits(table), self.fixed, self.indices, self.values, device)

    def wire_bytes(self, group: Group) -> Sizes:
        """Return the bytes of indices and values, without indices that are deflated."""
        form = self.format(group.table)
        return form.wire_bytes(form.limits)

    def exchange(self, group: Group, context: StepContext) -> Exchange:
        """Request one Gather.

        On a device, a selection of known size is encoded in the call that makes it, any other in a second call.
        """
        form = group.scratch.once("format", lambda: self.format(group.table, group.device))
        chosen = group.scratch.once("chosen", lambda: Selection.allocate(form.limits, form.device))
        flags = group.scratch.once("flags", lambda: np.zeros(len(group.table), dtype=np.uint8))
        on_device = form.device is not HOST
        together = on_device and self.in_one_call and form.fixed
        apart = on_device and self.in_one_call and not form.fixed
        factors = context.scale, context.decay

        def select() -> None:
            flags.fill(0)
            work = partial(self.select, group, context, chosen, flags)
            replayed_calls.run(factors, (group.inputs,), work)

        def write(view: Bytes) -> tuple[Bytes, int]:
            used = 0

            def work() -> None:
                nonlocal used
                if together:
                    self.select(group, context, chosen, flags)
                used, errors = form.encode(chosen, view, flags, context.draw)
                keep_errors(group, chosen, errors)

            if not apart:
                flags.fill(0)
                if not together:
                    self.select(group, context, chosen, flags)
            if not on_device:
                work()
                return flags, used
            used = form.begin(chosen.counts, view)
            # Where momentum is masked, keep_errors writes to it.
            masked = group.inputs["gradient"].tobytes() if group.compressor.traits.masks_momentum else b""
            key = factors, context.draw if form.draws else None, chosen.counts.tobytes(), masked
            replayed_calls.run(key, (group.inputs, view), work)
            return flags, used

        by_kernels, begin = self.by_kernels and form.fixed, select if apart else None
        reply = yield Gather(form.max_bytes, write, form.fixed, by_kernels, begin)
        return scatter_payloads(form, group, context, reply.data, reply.flags)


def keep_errors(group: Group, chosen: Selection, errors: Floats) -> None:
    """Write the coding's loss to the residuals of what is sent, and reset its momentum, if that is masked."""
    table = group.inputs
    if group.feedback:
        group.device.kernels.put(table, chosen.offsets, chosen.counts, chosen.indices, errors)
    if group.compressor.traits.masks_momentum:
        momentum = table.copy()
        momentum["next_residual"] = table["gradient"]  # the column points to the momentum, float32
        zeros = group.scratch.once("zeros", lambda: chosen.device.array(len(chosen.values), np.float32))
        group.device.kernels.put(momentum, chosen.offsets, chosen.counts, chosen.indices, zeros)


def scatter_payloads(
    form: SparseFormat, group: Group, context: StepContext, payloads: list[Bytes], flags: Bytes
) -> Bytes:
    """Decode every rank's payload and write the mean to the outputs; return the rows that are not finite."""
    arrived = group.scratch.once("arrived", lambda: _Arrived(form, len(payloads)))
    own, table = arrived.flags, group.table

    def work() -> None:
        for rank, payload in enumerate(payloads):
            into = Selection(
                arrived.offsets[rank], arrived.counts[rank], arrived.indices, arrived.values, form.device
            )
            form.decode(payload, into, rank)
        places = arrived.offsets, arrived.counts, arrived.indices, arrived.values
        group.device.kernels.scatter_mean(table, own, *places, divisor=context.divisor, scale=context.unscale)

    own[:] = flags
    if form.device is HOST:
        work()
        return own
    written = (table["output"] != 0).tobytes()
    key = (context.divisor, context.unscale, written, flags.tobytes(), *map(form.told, payloads))
    replayed_calls.run(key, (table, *payloads), work)
    return own


class _Arrived:
    """Hold the selections of all ranks, one after the other. ``flags`` are those of the rows of their mean."""

    def __init__(self, form: SparseFormat, world: int) -> None:
        limits, total = form.limits, int(form.limits.sum())
        self.offsets: Sizes = np.cumsum(limits) - limits + total * np.arange(world)[:, None]
        self.counts = np.empty_like(self.offsets)
        self.indices: npt.NDArray[np.uint32] = form.device.array(world * total, np.uint32)
        self.values: Floats = form.device.array(world * total, np.float32)
        self.flags = np.zeros(len(limits), dtype=np.uint8)
