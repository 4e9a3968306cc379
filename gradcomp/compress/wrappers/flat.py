"""Flat compresses an exchange bucket as one vector, as a library beneath the framework has to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from gradcomp.compress.base import Coded, Compressor, Traffic, Traits
from gradcomp.compress.messages import Exchange, Reduce
from gradcomp.compress.registry import register
from gradcomp.compress.wrappers.base import Wrapper
from gradcomp.core.errors import ConfigError
from gradcomp.core.layers import LayerSpec
from gradcomp.core.plan import Level
from gradcomp.kernels import replayed_calls
from gradcomp.kernels.codec import Codec, Group, Sizes, Table
from gradcomp.kernels.segments import FLOAT32, FP32
from gradcomp.kernels.step import StepContext


@register("flat")
@dataclass(frozen=True)
class Flat(Wrapper):
    """Compress the layers of an exchange bucket as one vector, in which quantisation buckets run across layers.

    v = (layer 1, layer 2, ...), all layers and slices of this compressor and dtype in the bucket, in their order;
    result = mean over ranks of Q(v), with Q = ``inner`` at one level. A layer without a gradient on a rank contributes
    zeros. If a value of any layer is not finite, the mean of all of them is NaN.

    Gradients are copied into v, in float32, and means out of it: two passes over memory that the layer-wise form does
    not need, as a fused buffer of NCCL takes them too. Which layers share a quantisation bucket depends on the size and
    the order of exchange buckets, and with them the mean does.

    Wire: as ``inner`` on one layer of the size of v. State: none.
    Errors: ConfigError for an ``inner`` that is a wrapper, keeps a residual, has momentum, bits by block, or codes that
    a reduction cannot add, such as sparse and low-rank ones, and for one that loses nothing.
    Source: Markov 2024, section 3.5.4 (QNCCL). Differs: runs in gradcomp's exchange instead of NCCL's, so its
    reductions, flags and checks apply; there is no feedback, which the paper has not either.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        own, name = self.inner.traits, self.inner.to_string()
        if type(self.inner).exchange is not Coded.exchange or own.exact or not own.accounts:
            raise ConfigError(
                f"one vector without layers takes a quantiser, such as quantize:bits=4, not {name}"
            )
        if own.keeps_residual or own.preconditions:
            raise ConfigError(
                f"one vector without layers keeps no residual and no momentum, which {name} has: round "
                "stochastically, or set feedback=false"
            )
        if isinstance(self.inner.level, tuple):
            raise ConfigError(f"one vector without layers has one level, not one by block of rows: {name}")

    @cached_property
    def traits(self) -> Traits:
        return replace(self.inner.traits, joins=True)

    @property
    def level(self) -> Level:
        """Return None: the level belongs to all layers together, so a plan cannot vary it by layer."""
        return None

    def with_level(self, level: Level) -> Compressor:
        return Compressor.with_level(self, level)

    def alternatives(self) -> tuple[Compressor, ...]:
        return ()

    def dense(self, exact: Compressor) -> Compressor:
        return exact

    def bare(self) -> Compressor:
        return self

    def by_place(self, own: Sequence[LayerSpec], layers: Sequence[LayerSpec]) -> Mapping[str, Compressor]:
        return {}

    def family_string(self) -> str:
        return self.to_string()

    def fill(self, table: Table, level: Level) -> None:
        self.inner.fill(table, self.inner.level)

    def wire_bytes(self, group: Group) -> Sizes:
        """Return the bytes of the vector with the first segment, which stands for all, and 0 for the others."""
        return self.inner.wire_bytes(_Vector.of(group).group)

    def traffic(self, group: Group) -> Traffic:
        return self.inner.traffic(_Vector.of(group).group)

    def exchange(self, group: Group, context: StepContext) -> Exchange:
        vector = _Vector.of(group)
        codec = group.scratch.once("codec", lambda: self.inner.codec_for(vector.group.table))  # type: ignore[attr-defined]
        reply = yield Reduce(codec, vector.group, vector.parts)
        vector.scatter()
        return np.full(len(reply.flags), np.uint8(reply.flags.any()))


class _Vector:
    """The vector of a group: a group whose first segment is the whole vector, and all others are empty."""

    def __init__(self, group: Group) -> None:
        table, lengths = group.table.copy(), group.table["length"].astype(np.int64)
        table["length"] = 0
        table["length"][0] = lengths.sum()
        table["dtype"] = FLOAT32
        self.group = replace(group, table=table, prepared=True, joined=group.table)
        #: The layers' segments, whose outputs are those of the step.
        self.parts = group.table.copy()
        self.parts["payload"] = 4 * (np.cumsum(lengths) - lengths)

    @classmethod
    def of(cls, group: Group) -> _Vector:
        """Return the group's only instance, which the first call makes."""
        return group.scratch.once("flat", lambda: cls(group))

    def scatter(self) -> None:
        """Copy the mean to the layers' outputs, in their dtype."""
        group, parts = self.group, self.parts
        mean = group.means.view(np.uint8)
        flags = np.zeros(len(parts), dtype=np.uint8)
        replayed_calls.run(
            (parts["output"] != 0).tobytes(),
            (parts,),
            lambda: Codec(FP32).decode(group.device, parts, mean, flags),
        )
