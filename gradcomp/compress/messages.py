"""The first vocabulary: what a compressor may ask of the pipeline. It never names a transport or a reduction."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from gradcomp.kernels.codec import Codec, Group

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
    With ``fixed`` that is always ``max_bytes``; else sizes travel with the first bytes, and what is larger than of late
    takes a second round.
    ``reply.data`` lists the payloads in rank order; their lengths are what was announced, their bytes nobody checked.

    ``by_kernels``: kernels alone touch the view, and payloads, which may then be a device's.

    ``select`` finds out how much there is to write: it does nothing but call kernels, none of which needs what another
    one leaves on the host (:func:`gradcomp.kernels.routines.run`). ``write`` is called when they are through. Nothing
    blocks in between. None: ``write`` does all of it.
    """

    max_bytes: int
    write: Callable[[Bytes], tuple[Bytes, int]]
    fixed: bool = True
    by_kernels: bool = False
    select: Callable[[], None] | None = None

    def write_at_once(self, view: Bytes) -> tuple[Bytes, int]:
        """Both parts, where kernels are through when they return."""
        if self.select is not None:
            self.select()
        return self.write(view)


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
    select: ClassVar[None] = None


@dataclass(frozen=True, eq=False)
class Reply:
    """What came of a message. ``flags``: per segment, whether some rank met a non-finite value so far."""

    flags: Bytes
    data: Any = None


Message = Sum | Reduce | Gather | Broadcast
#: Sent the replies; returns one flag per segment, nonzero where the mean is not finite.
Exchange = Generator[Message, Reply, Bytes]
