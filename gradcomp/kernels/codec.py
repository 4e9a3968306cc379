"""A codec: one kernel family with its configuration, applied to a whole table of segments at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from gradcomp.core.vectors import Vector
from gradcomp.kernels import segments
from gradcomp.kernels.devices import HOST, Device
from gradcomp.kernels.segments import Bytes, Draw, SegmentTable, Sizes

__all__ = ["Bytes", "Codec", "Draw", "Group", "Scratch", "Sizes", "Table"]

Table = SegmentTable

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Codec:
    """Encodes float arrays to bytes and decodes them; it sends nothing and keeps no state.

    ``kind`` is one of the codec constants of :mod:`gradcomp.kernels.segments`. ``stochastic`` rounds to the upper
    level with probability (v - lower) / (upper - lower) (Markov et al. 2024, section 2.2.3), else to the nearest.
    ``magnitudes`` belong to the codebook kinds (see :data:`gradcomp.kernels.segments.Magnitudes`). Every method runs on
    ``device``, in whose memory the addresses of ``table`` lie.
    """

    kind: int
    stochastic: bool = False
    magnitudes: segments.Magnitudes | None = None

    def wire_bytes(self, table: Table) -> Sizes:
        """Returns the payload bytes of each segment."""
        return segments.wire_bytes_table(self.kind, table)

    def encode(
        self,
        device: Device,
        table: Table,
        payload: Bytes,
        flags: Bytes,
        draw: Draw,
        scale: float = 1.0,
        decay: float = 1.0,
    ) -> None:
        """Encodes c = scale g + decay r: payload <- encode(c); next residual <- c - decode(payload)."""
        device.kernels.encode(
            self.kind,
            table,
            payload,
            flags,
            draw=draw if self.stochastic else None,
            scale=scale,
            decay=decay,
            magnitudes=self.magnitudes,
        )

    def decode(
        self,
        device: Device,
        table: Table,
        payload: Bytes,
        flags: Bytes,
        divisor: float = 1.0,
        scale: float = 1.0,
    ) -> None:
        """Writes output <- scale (value / divisor), in the segment's dtype; NaN where the segment is flagged."""
        device.kernels.decode(
            self.kind, table, payload, flags, divisor=divisor, scale=scale, magnitudes=self.magnitudes
        )

    def add(self, device: Device, table: Table, payload: Bytes) -> None:
        """Adds: output <- output + value, in float32."""
        device.kernels.decode_add(self.kind, table, payload, scale=1.0, magnitudes=self.magnitudes)

    def reduce(
        self,
        device: Device,
        table: Table,
        payloads: Sequence[Bytes],
        out: Bytes,
        flags: Bytes,
        draw: Draw,
        divisor: float,
        decay: float = 1.0,
    ) -> None:
        """Encodes c = (sum of decoded payloads, in order) / divisor + decay r; next residual <- c - decode(out)."""
        device.kernels.reduce(
            self.kind,
            table,
            payloads,
            out,
            flags,
            draw=draw if self.stochastic else None,
            divisor=divisor,
            decay=decay,
            magnitudes=self.magnitudes,
        )


class Scratch:
    """Working memory, by name, that is allocated once for all steps. The contents of an array are valid for one step.

    ``device``: where the gradients are.
    """

    def __init__(self, device: Device = HOST) -> None:
        self.device = device
        self._arrays: dict[str, npt.NDArray[Any]] = {}
        self._vectors: dict[str, Vector] = {}
        self._made: dict[str, Any] = {}

    def array(
        self, name: str, size: int, dtype: npt.DTypeLike = np.float32, device: Device = HOST
    ) -> npt.NDArray[Any]:
        """Returns ``size`` elements of undefined content; those on a device are accessed by kernels only."""
        found = self._arrays.get(name)
        if found is None or len(found) < size:
            found = self._arrays[name] = device.array(size, dtype)
        return found[:size]

    def vector(self, name: str, size: int) -> Vector:
        """Returns at least ``size`` floats of undefined content, which tables of gradients can refer to."""
        found = self._vectors.get(name)
        if found is None or found.size < size:
            found = self._vectors[name] = self.device.zeros(size)
        return found

    def once(self, name: str, make: Callable[[], T]) -> T:
        """Returns the result of the first ``make`` that was passed under this name."""
        if name not in self._made:
            self._made[name] = make()
        made: T = self._made[name]
        return made


@dataclass(frozen=True, eq=False)
class Group:
    """The part of an exchange bucket that shares one compressor.

    ``table`` has the static columns filled (start, length, layer hash, level, bucket size, dtype); whoever makes a
    call fills in addresses and payload offsets. ``layers[i]`` is the number, within the exchanger, of the layer that
    segment i belongs to, ``shapes[i]`` that layer's shape. ``feedback``: the compressor keeps residuals; ``decay``
    multiplies them when they are read, and so does, with ``follows_rate``, the last learning rate over this one.
    ``prepared``: the compressor uses momentum or clipping, so its input is float32 and already scaled.
    ``joined``: the segments of layers that lie one after the other in the group's own memory, all of which is its first
    segment; None: segments lie in the layers' memory.
    """

    compressor: Any
    table: Table
    layers: Sizes
    feedback: bool
    decay: float = 1.0
    shapes: tuple[tuple[int, ...], ...] = ()
    follows_rate: bool = False
    prepared: bool = False
    scratch: Scratch = field(default_factory=Scratch)
    joined: Table | None = None

    @cached_property
    def device(self) -> Device:
        """Returns the device of the gradients."""
        return self.scratch.device

    @property
    def elements(self) -> int:
        """Returns the number of elements of all segments."""
        return int(self.table["length"].sum())

    @cached_property
    def inputs(self) -> Table:
        """Returns the table for kernels that read gradients; ``table`` is the one for those that write means."""
        table = self.table.copy()
        if self.prepared:
            table["dtype"] = segments.FLOAT32
        return table

    @property
    def means(self) -> npt.NDArray[np.float32]:
        """Returns the memory for the means of joined segments; that on a GPU is accessed by kernels only."""
        assert self.joined is not None, "other segments have outputs of their own"
        return self.scratch.array("means", int(self.joined["length"].sum()), np.float32, self.device)

    def scale(self, scale: float) -> float:
        """Returns the factor that still has to be applied to the compressor's input."""
        return 1.0 if self.prepared else scale

    def decay_at(self, rate_ratio: float) -> float:
        """Returns the residuals' factor in a step whose learning rate is the last one over ``rate_ratio``."""
        return self.decay * rate_ratio if self.follows_rate else self.decay
