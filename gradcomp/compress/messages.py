"""Messages are what a compressor may ask of the pipeline. They name neither a transport nor a reduction."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from gradcomp.kernels.codec import Codec, Group, Table

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class Sum:
    """Request the sum over ranks of ``length`` elements of ``dtype`` (float32 or float64).

    ``write(view)`` fills this rank's summand, a view into the buffer that all groups of the exchange bucket share, and
    returns one flag per segment: nonzero where it met a non-finite value. ``reply.data`` is the same view; it then
    holds the sum, bit-identical on all ranks. Flags travel with the first sums of an exchange bucket only; if a later
    one raises a new flag, the group's whole sum is NaN on all ranks.

    ``by_kernels``: before and after the sum, only kernels that take tables touch the view, so it may be device memory
    (:mod:`gradcomp.kernels.cuda.mirrors`, whose ``fill`` may be used too).
    """

    length: int
    write: Callable[[Floats], Bytes]
    dtype: str = "float32"
    by_kernels: bool = False


@dataclass(frozen=True, eq=False)
class Reduce:
    """Request the mean over ranks of the group's segments, through a codec whose codes cannot be added.

    The reduction encodes, may encode the mean again (and then keeps the server-side error) and writes the mean to the
    outputs. ``reply.flags`` is the result: nonzero where the mean is not finite.

    A compressor may send another group than its own, such as a part of it, which has a segment, possibly empty, for
    each of the whole group's. ``rest`` is then a table of segments whose means the compressor writes itself: it has
    their addresses when the reply arrives.
    """

    codec: Codec
    group: Group
    rest: Table | None = None


@dataclass(frozen=True, eq=False)
class Gather:
    """Request every rank's payload of at most ``max_bytes``.

    ``write(view)`` fills the payload, in a view of ``max_bytes``, and returns one flag per segment and the bytes used.
    With ``fixed``, that is always ``max_bytes``. Otherwise sizes travel with the first bytes, and a payload that is
    larger than the sizes of recent steps takes a second round.
    ``reply.data`` lists the payloads in rank order. Their lengths are those announced; their contents are unchecked.

    ``by_kernels``: only kernels touch the view and the payloads, which may then be device memory.

    ``select`` determines how much there is to write: it only calls kernels, none of which needs what another one leaves
    on the host (:func:`gradcomp.kernels.replayed_calls.run`). ``write`` is called when they have ended; nothing blocks
    in between. None: ``write`` does all of it.
    """

    max_bytes: int
    write: Callable[[Bytes], tuple[Bytes, int]]
    fixed: bool = True
    by_kernels: bool = False
    select: Callable[[], None] | None = None

    def write_at_once(self, view: Bytes) -> tuple[Bytes, int]:
        """Run ``select`` and ``write`` one after the other, where kernels have ended when they return."""
        if self.select is not None:
            self.select()
        return self.write(view)


@dataclass(frozen=True, eq=False)
class Broadcast:
    """Request the payload of rank ``root``; otherwise it is like :class:`Gather`.

    ``write`` is called on every rank, because it returns flags and may prepare state. Except on the root its ``view``
    is empty, and the number of bytes that it returns is ignored. ``reply.data`` is the root's payload.
    """

    max_bytes: int
    write: Callable[[Bytes], tuple[Bytes, int]]
    root: int
    fixed: bool = True
    by_kernels: ClassVar[bool] = False
    select: ClassVar[None] = None


@dataclass(frozen=True, eq=False)
class Reply:
    """Answer a message. ``flags``: per segment, nonzero if some rank has met a non-finite value so far."""

    flags: Bytes
    data: Any = None


Message = Sum | Reduce | Gather | Broadcast
#: It is sent the replies, and returns one flag per segment: nonzero where the mean is not finite.
Exchange = Generator[Message, Reply, Bytes]
