"""The first vocabulary: what a compressor may ask of the pipeline. It never names a transport or a reduction."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from gradcomp.core.state import DoubleBuffer, Fields
from gradcomp.kernels.codec import Codec, Draw, Group, Sizes

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class Sum:
    """Ask for the sum over ranks of ``length`` elements of ``dtype`` (float32 or float64).

    ``write(view)`` fills this rank's summand, a view into the buffer that all groups of the bucket share, and returns
    one flag per segment: nonzero where it met a non-finite value. ``reply.data`` is the same view, holding the sum,
    bit-identical on all ranks. Flags travel with a bucket's first sums only; if a new one is raised later, the group's
    whole sum is NaN, on all ranks.

    ``by_kernels``: kernels that take tables alone touch the view, before and after, so that it may be a device's
    (:mod:`gradcomp.kernels.cuda.mirrors`, whose ``fill`` may be used too).
    """

    length: int
    write: Callable[[Floats], Bytes]
    dtype: str = "float32"
    by_kernels: bool = False


@dataclass(frozen=True, eq=False)
class Reduce:
    """Ask for the mean over ranks of the group's segments through a codec whose codes cannot be added.

    The reduction encodes, may re-encode (and then owns the second residual) and writes the mean to the outputs.
    ``reply.flags`` is the result: nonzero where the mean is not finite.
    """

    codec: Codec
    group: Group


@dataclass(frozen=True, eq=False)
class Gather:
    """Ask for every rank's payload of at most ``max_bytes``.

    ``write(view)`` fills the payload, in a view of ``max_bytes``, and returns one flag per segment and the bytes used.
    With ``fixed`` that is always ``max_bytes``; else sizes are exchanged first, in one round for the whole bucket.
    ``reply.data`` lists the payloads in rank order; their lengths are what was announced, their bytes nobody checked.

    ``by_kernels``: kernels alone touch the view, and payloads, which may then be a device's.
    """

    max_bytes: int
    write: Callable[[Bytes], tuple[Bytes, int]]
    fixed: bool = True
    by_kernels: bool = False


@dataclass(frozen=True, eq=False)
class Broadcast:
    """Ask for the payload of rank ``root``; as :class:`Gather` otherwise.

    ``write`` is called on every rank, for its flags and for what it prepares; ``view`` is empty on the others, and
    what they return as bytes used does not count. ``reply.data`` is the root's payload.
    """

    max_bytes: int
    write: Callable[[Bytes], tuple[Bytes, int]]
    root: int
    fixed: bool = True
    by_kernels: ClassVar[bool] = False


@dataclass(frozen=True, eq=False)
class Reply:
    """What came of a message. ``flags``: per segment, whether some rank met a non-finite value so far."""

    flags: Bytes
    data: Any = None


Message = Sum | Reduce | Gather | Broadcast
#: Sent the replies; returns one flag per segment, nonzero where the mean is not finite.
Exchange = Generator[Message, Reply, Bytes]


class Observations:
    """What compressors note of a step while they encode it, by name and layer: for a controller."""

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self._noted: dict[str, npt.NDArray[np.float64]] = {}

    def add(self, name: str, layers: Sizes, values: npt.NDArray[np.float64]) -> None:
        """Add ``values[i]`` to what is noted of layer ``layers[i]``; no layer twice."""
        self.of(name)[layers] += values

    def of(self, name: str) -> npt.NDArray[np.float64]:
        """By layer number; zeros where nothing was noted."""
        return self._noted.setdefault(name, np.zeros(self._layers))


@dataclass(frozen=True)
class Context:
    """What an exchange knows beside its group.

    ``scale`` multiplies gradients before, ``unscale`` the results after; ``decay`` multiplies residuals; ``divisor``
    turns a sum over ranks into the result: the number of ranks, or 1 where the user asked for sums. ``fields`` is the
    state that compressors keep by layer, beside residuals. ``observations`` is there if a controller looks on.
    ``servers``: how many ranks, before those counted by ``world`` and ``draw``, only serve, for messages of errors.
    """

    draw: Draw
    world: int
    scale: float = 1.0
    unscale: float = 1.0
    divisor: float = 1.0
    decay: float = 1.0
    rate_ratio: float = 1.0
    fields: Fields | None = None
    observations: Observations | None = None
    servers: int = 0

    def of(self, group: Group) -> Context:
        """The context as the group sees it: a prepared gradient is scaled already."""
        return replace(
            self, scale=group.scale(self.scale), decay=group.decay_at(self.rate_ratio), rate_ratio=1.0
        )

    def factors(self, rows: int) -> Floats:
        """The factor of every row's gradient, as kernels take it."""
        return np.full(rows, self.scale, dtype=np.float32)

    def field(self, name: str) -> DoubleBuffer:
        """A field's values, by layer."""
        assert self.fields is not None, "state is there when a step runs"
        return self.fields[name]

    def load(self, name: str, layers: Sizes) -> Floats:
        """The layers' values of a field, one behind the other: a copy."""
        return self.field(name).load(layers)

    def store(self, name: str, layers: Sizes, values: Floats) -> None:
        """What the field holds for these layers once the step is accepted."""
        self.field(name).store(layers, values)
