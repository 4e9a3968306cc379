"""No compression: the exact mean."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from gradcomp.compress.base import Coded, Traits
from gradcomp.compress.bounds import Distortion
from gradcomp.compress.messages import Bytes, Exchange, Floats, Reduce, Sum
from gradcomp.compress.registry import register
from gradcomp.core.layers import LayerSpec
from gradcomp.core.plan import Level
from gradcomp.kernels import routines
from gradcomp.kernels.codec import Codec, Group, Sizes, Table
from gradcomp.kernels.cuda.mirrors import fill
from gradcomp.kernels.segments import BF16, BFLOAT16, FLOAT64, FP32, FP64
from gradcomp.kernels.step import StepContext

#: Cut points of casts: one cache line of float32.
CAST_BLOCK = 16


@register("none")
@dataclass(frozen=True)
class Identity(Coded):
    """Uncompressed exchange: mean = (sum of g over ranks) / N.

    Float32 and float64 layers are summed by the transport's own allreduce (one round, 2 d (N-1)/N bytes per rank for
    d bytes of gradient), so the mean is bit-identical to that allreduce divided by N. Float16 layers are summed the
    same way in float32: a half-precision sum would lose bits. Bfloat16 layers travel as they are and are added in
    float32 by a reduction; the one rounding is the output's. No state, and so no use for
    the loss scale: sums keep it. Inside a wrapper that brings state they do not, and nothing of what is kept in float32
    is rounded to bfloat16. A segment with a non-finite value is NaN in every summand that has one.
    """

    def compress(self, tensor: Any) -> tuple[Any, Any]:
        """Horovod's: the tensor as it is, and nothing."""
        return tensor, None

    def decompress(self, tensor: Any, context: Any) -> Any:
        """Horovod's: the tensor as it is."""
        return tensor

    @cached_property
    def traits(self) -> Traits:
        """Only bfloat16 is reduced, and nothing need ride along."""
        return Traits(exact=True)

    def distortion(self, layer: LayerSpec) -> Distortion:
        """Nothing is lost."""
        return Distortion(0.0, True, 0.0)

    def fill(self, table: Table, level: Level) -> None:
        """No level; cuts at cache lines."""
        table["level"] = 0
        table["bucket_size"] = CAST_BLOCK

    def is_summed(self, layer: LayerSpec) -> bool:
        """Every dtype but bfloat16."""
        return layer.dtype != "bfloat16"

    def cut_elements(self, layer: LayerSpec) -> int:
        """One cache line of float32."""
        return CAST_BLOCK

    def codec_for(self, table: Table) -> Codec:
        """The lossless codec of the table's dtype (a group holds one dtype)."""
        return Codec({FLOAT64: FP64, BFLOAT16: BF16}.get(int(table["dtype"][0]), FP32))

    def wire_bytes(self, group: Group) -> Sizes:
        """An element's own; 4 bytes of what is more than a bfloat16."""
        return self._reduced(group).wire_bytes(group.table)

    def _reduced(self, group: Group) -> Codec:
        """The lossless codec of what is sent: momentum and what is added to a residual are float32."""
        codec = self.codec_for(group.table)
        return Codec(FP32) if codec.kind == BF16 and (group.prepared or group.feedback) else codec

    def exchange(self, group: Group, context: StepContext) -> Exchange:
        """One Sum over the packed gradients, or one Reduce for bfloat16."""
        codec, table = self.codec_for(group.table), group.inputs
        if codec.kind == BF16:
            return (yield Reduce(self._reduced(group), group)).flags
        flags = group.scratch.once("flags", lambda: _laid_out(group, codec))
        # Momentum and residuals, which an earlier plan or a wrapper leaves, are kept without the loss scale.
        unscaled = group.prepared or group.feedback
        factors = (context.scale, context.decay) if group.feedback else (1.0, 1.0)

        def write(view: Floats) -> Bytes:
            flags.fill(0)
            routines.run(
                factors,
                (table, view),
                lambda: codec.encode(table, view.view(np.uint8), flags, context.draw, *factors),
                lambda: spoil(view),
            )
            return flags

        def spoil(view: Floats) -> None:
            """Encode leaves zeros for a segment that is not finite, and the others would add up to a finite mean."""
            if flags.any():
                for row in np.flatnonzero(flags):
                    start = int(table["payload"][row]) // view.itemsize
                    fill(view[start : start + int(table["length"][row])], np.nan)

        dtype = "float64" if codec.kind == FP64 else "float32"
        reply = yield Sum(group.elements, write, dtype, by_kernels=True)
        flags.fill(0)
        settings = {"divisor": context.divisor, "scale": context.unscale if unscaled else 1.0}
        routines.run(
            (*settings.values(), (group.table["output"] != 0).tobytes()),
            (group.table, reply.data),
            lambda: codec.decode(group.table, reply.data.view(np.uint8), flags, **settings),
        )
        return flags


def _laid_out(group: Group, codec: Codec) -> Bytes:
    """A Sum's buffer holds the segments one after the other. Returns flags for the rows."""
    group.inputs["payload"] = np.concatenate(([0], np.cumsum(codec.wire_bytes(group.inputs))[:-1]))
    group.table["payload"] = group.inputs["payload"]
    return np.zeros(len(group.table), dtype=np.uint8)
