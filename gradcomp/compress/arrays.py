"""GroupArray presents a group as one NumPy array, for compressors that need no kernel of their own."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from gradcomp.core.errors import ConfigError
from gradcomp.core.vectors import HostVector
from gradcomp.kernels.codec import Codec, Group
from gradcomp.kernels.devices import HOST
from gradcomp.kernels.segments import FLOAT32, FP32
from gradcomp.kernels.step import StepContext

Array = npt.NDArray[Any]


class GroupArray:
    """Present the layers of a group one after the other, in float32, in this process's memory.

    p = scale g + decay r;  r' = what is kept;  output = total / N, in the gradients' dtype and units

    ``slices[i]``: the slice of the i-th layer's elements. The function that fills the send buffer calls :meth:`read`
    and :meth:`keep`, the code after the replies calls :meth:`finish`. Gradients on a GPU are copied to this process and
    back.

    State: working memory of 4 bytes per element, allocated once for a group.
    Errors: ConfigError unless the compressor's traits have ``keeps_residual`` or ``contributes``.
    """

    def __init__(self, group: Group) -> None:
        traits = group.compressor.traits
        if not (group.feedback or traits.keeps_residual or traits.contributes):
            raise ConfigError(
                f"{group.compressor.name} reads its group as an array: its traits need keeps_residual or contributes"
            )
        ends = np.cumsum(group.table["length"].astype(np.int64))
        begins = ends - group.table["length"]
        self.slices = [slice(begin, end) for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)]
        self._group = group
        self._offsets = 4 * begins
        on_host = group.device is HOST
        self._values = np.zeros(group.elements, dtype=np.float32)
        self._vector = HostVector(self._values) if on_host else group.scratch.vector("array", group.elements)
        self._ones = np.ones(len(begins), dtype=np.float32)

    @classmethod
    def of(cls, group: Group) -> GroupArray:
        """Return the group's only instance, which the first call makes."""
        return group.scratch.once("group array", lambda: cls(group))

    def read(self, context: StepContext) -> tuple[Array, Array]:
        """Return p, which may be changed in place, and a flag per layer: nonzero where p is not finite."""
        table = self._group.inputs.copy()
        table["next_residual"] = self._addresses()
        flags = np.zeros(len(table), dtype=np.uint8)
        self._group.device.kernels.contribute(table, flags, context.factors(len(table)), decay=context.decay)
        if self._group.device is not HOST:
            self._values[:] = self._vector.read(0, len(self._values))
        return self._values, flags

    def keep(self, residuals: Array) -> None:
        """Store the next residuals, which take effect if the step is accepted."""
        self._vector.write(residuals)
        table = self._group.inputs.copy()
        table["gradient"], table["dtype"], table["residual"] = self._addresses(), FLOAT32, 0
        self._group.device.kernels.contribute(
            table, np.zeros(len(table), dtype=np.uint8), self._ones, decay=1.0
        )

    def finish(self, total: Array, flags: Array, context: StepContext) -> Array:
        """Write the result, from the sum over ranks; return the flags of the layers that are not finite in it.

        The result of a layer whose flag is set already is NaN.
        """
        flags, table = flags.copy(), self._group.table
        table["payload"] = self._offsets
        payload = np.ascontiguousarray(total, dtype=np.float32).view(np.uint8)
        Codec(FP32).decode(
            self._group.device, table, payload, flags, divisor=context.divisor, scale=context.unscale
        )
        return flags

    def _addresses(self) -> Array:
        addresses: Array = np.uint64(self._vector.address) + self._offsets.astype(np.uint64)
        return addresses
