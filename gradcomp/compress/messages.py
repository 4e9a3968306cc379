"""The first vocabulary: what a compressor may ask of the pipeline. It never names a transport or a reduction."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gradcomp.kernels.codec import Codec, Draw, Group

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class Sum:
    """Ask for the sum over ranks of ``length`` elements of ``dtype`` (float32 or float64).

    ``write(view)`` fills this rank's summand, a view into the buffer that all groups of the bucket share, and returns
    one flag per segment: nonzero where it met a non-finite value. The reply is the same view, holding the sum,
    bit-identical on all ranks.
    """

    length: int
    write: Callable[[Floats], Bytes]
    dtype: str = "float32"


@dataclass(frozen=True, eq=False)
class Reduce:
    """Ask for the mean over ranks of the group's segments through a codec whose codes cannot be added.

    The reduction encodes, may re-encode (and then owns the second residual) and writes the mean to the outputs.
    The reply is one flag per segment, nonzero where the mean is not finite; equal on all ranks.
    """

    codec: Codec
    group: Group


Message = Sum | Reduce
#: Sent the replies; returns one flag per segment, nonzero where the mean is not finite.
Exchange = Generator[Message, Any, Bytes]


@dataclass(frozen=True)
class Context:
    """What an exchange knows beside its group.

    ``scale`` multiplies gradients before, ``unscale`` the results after; ``divisor`` turns a sum over ranks into the
    result: the number of ranks, or 1 where the user asked for sums.
    """

    draw: Draw
    world: int
    scale: float = 1.0
    unscale: float = 1.0
    divisor: float = 1.0
