"""A codec: one kernel family with its configuration, applied to a whole table of segments at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gradcomp import kernels
from gradcomp.kernels import segments

Bytes = npt.NDArray[np.uint8]
Table = npt.NDArray[np.void]
Sizes = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Draw:
    """Coordinates of the random numbers of one step: counter-based, so nothing random is saved or sent."""

    seed: int
    step: int
    rank: int


@dataclass(frozen=True)
class Codec:
    """Encode and decode between float arrays and bytes; pure, no network, no memory.

    ``kind`` is one of the codec constants of :mod:`gradcomp.kernels.segments`. ``stochastic`` rounds to the upper
    level with probability (v - lower) / (upper - lower) (thesis, section 2.2.3), else to the nearest.
    """

    kind: int
    stochastic: bool = False

    def wire_bytes(self, table: Table) -> Sizes:
        """Payload bytes of every segment."""
        return segments.wire_bytes_table(self.kind, table)

    def encode(
        self, table: Table, payload: Bytes, flags: Bytes, draw: Draw, scale: float = 1.0, decay: float = 1.0
    ) -> None:
        """c = scale g + decay r; payload <- encode(c); shadow <- c - decode(payload)."""
        kernels.encode(
            self.kind,
            table,
            payload,
            flags,
            stochastic=self.stochastic,
            seed=draw.seed,
            step=draw.step,
            rank=draw.rank,
            scale=scale,
            decay=decay,
        )

    def decode(
        self, table: Table, payload: Bytes, flags: Bytes, divisor: float = 1.0, scale: float = 1.0
    ) -> None:
        """output <- scale (value / divisor), in the segment's dtype; NaN where the segment is flagged."""
        kernels.decode(self.kind, table, payload, flags, divisor=divisor, scale=scale)

    def reduce(
        self,
        table: Table,
        payloads: Sequence[Bytes],
        out: Bytes,
        flags: Bytes,
        draw: Draw,
        decay: float = 1.0,
    ) -> None:
        """c = (sum of the decoded payloads, in order) / N + decay r2; out <- encode(c); shadow <- c - decode(out)."""
        kernels.reduce(
            self.kind,
            table,
            payloads,
            out,
            flags,
            stochastic=self.stochastic,
            seed=draw.seed,
            step=draw.step,
            divisor=float(len(payloads)),
            decay=decay,
        )


@dataclass(frozen=True, eq=False)
class Group:
    """The part of a bucket that shares one compressor.

    ``table`` has the static columns filled (start, length, layer hash, bits, bucket size, dtype); addresses and
    payload offsets belong to whoever makes the call. ``layers[i]`` is the number, within the exchanger, of the layer
    that segment i belongs to. ``feedback``: the compressor keeps residuals; ``decay`` multiplies them when read.
    """

    compressor: Any
    table: Table
    layers: Sizes
    feedback: bool
    decay: float = 1.0

    @property
    def elements(self) -> int:
        """Elements of all segments."""
        return int(self.table["length"].sum())
