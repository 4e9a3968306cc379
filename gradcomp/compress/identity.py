"""Identity exchanges gradients without compression: the result is the exact mean."""

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
from gradcomp.kernels import replayed_calls
from gradcomp.kernels.codec import Codec, Group, Sizes, Table
from gradcomp.kernels.cuda.mirrors import fill
from gradcomp.kernels.segments import BF16, BFLOAT16, FLOAT64, FP32, FP64
from gradcomp.kernels.step import StepContext

#: Casts and sums cut layers at multiples of one cache line of float32.
CAST_BLOCK = 16


@register("none")
@dataclass(frozen=True)
class Identity(Coded):
    """Exchange without compression: mean = (sum of g over ranks) / N.

    Float32 and float64 layers are summed by the transport's own allreduce (one round, 2 d (N-1)/N bytes per rank for d
    bytes of gradient), so the mean is bit-identical to that allreduce divided by N. Float16 layers are summed in the
    same way, but in float32: a half-precision sum would lose bits. Bfloat16 layers travel as they are and are added in
    float32 by a reduction; only the output is rounded.
    State: none, so the loss scale can stay in the sums. Inside a wrapper with state it is removed, and what that state
    keeps in float32 is never rounded to bfloat16.
    Errors: none. A segment with a non-finite value is NaN in the summand of every rank that has one.
    """

    def compress(self, tensor: Any) -> tuple[Any, Any]:
        """Return the tensor as it is, and None: the interface of Horovod's compressors."""
        return tensor, None

    def decompress(self, tensor: Any, context: Any) -> Any:
        """Return the tensor as it is."""
        return tensor

    @cached_property
    def traits(self) -> Traits:
        """Return traits without ``reduces``: only bfloat16 is reduced, and no other layer needs that payload."""
        return Traits(exact=True)

    def distortion(self, layer: LayerSpec) -> Distortion:
        return Distortion(0.0, True, 0.0)

    def fill(self, table: Table, level: Level) -> None:
        table["level"] = 0
        table["bucket_size"] = CAST_BLOCK

    def is_summed(self, layer: LayerSpec) -> bool:
        return layer.dtype != "bfloat16"

    def cut_elements(self, layer: LayerSpec) -> int:
        return CAST_BLOCK

    def codec_for(self, table: Table) -> Codec:
        """Return the lossless codec of the table's dtype (a group holds one dtype)."""
        return Codec({FLOAT64: FP64, BFLOAT16: BF16}.get(int(table["dtype"][0]), FP32))

    def wire_bytes(self, group: Group) -> Sizes:
        """Return 8 bytes per float64 element, 2 per bfloat16 unless float32 state is added to it, and 4 otherwise."""
        return self._reduced(group).wire_bytes(group.table)

    def _reduced(self, group: Group) -> Codec:
        """Return the lossless codec of what is sent: momentum, and gradients plus residuals, are float32."""
        codec = self.codec_for(group.table)
        return Codec(FP32) if codec.kind == BF16 and (group.prepared or group.feedback) else codec

    def exchange(self, group: Group, context: StepContext) -> Exchange:
        """Request one Sum over the packed gradients, or one Reduce of bfloat16."""
        codec, table = self.codec_for(group.table), group.inputs
        if codec.kind == BF16:
            return (yield Reduce(self._reduced(group), group)).flags
        flags = group.scratch.once("flags", lambda: _laid_out(group, codec))
        # Momentum and residuals, from an earlier plan or a wrapper, are kept without the loss scale.
        unscaled = group.prepared or group.feedback
        factors = (context.scale, context.decay) if group.feedback else (1.0, 1.0)

        def write(view: Floats) -> Bytes:
            flags.fill(0)
            replayed_calls.run(
                factors,
                (table, view),
                lambda: codec.encode(group.device, table, view.view(np.uint8), flags, context.draw, *factors),
                lambda: spoil(view),
            )
            return flags

        def spoil(view: Floats) -> None:
            """Write NaN to segments that are not finite: encode leaves zeros, whose mean would be finite."""
            if flags.any():
                for row in np.flatnonzero(flags):
                    start = int(table["payload"][row]) // view.itemsize
                    fill(view[start : start + int(table["length"][row])], np.nan)

        dtype = "float64" if codec.kind == FP64 else "float32"
        reply = yield Sum(group.elements, write, dtype, by_kernels=True)
        flags.fill(0)
        settings = {"divisor": context.divisor, "scale": context.unscale if unscaled else 1.0}
        replayed_calls.run(
            (*settings.values(), (group.table["output"] != 0).tobytes()),
            (group.table, reply.data),
            lambda: codec.decode(group.device, group.table, reply.data.view(np.uint8), flags, **settings),
        )
        return flags


def _laid_out(group: Group, codec: Codec) -> Bytes:
    """Place the segments one after the other in the buffer of a Sum. Return flags for the rows."""
    group.inputs["payload"] = np.concatenate(([0], np.cumsum(codec.wire_bytes(group.inputs))[:-1]))
    group.table["payload"] = group.inputs["payload"]
    return np.zeros(len(group.table), dtype=np.uint8)
