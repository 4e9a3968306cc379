"""Arguments of kernels that belong together. The compiled module takes their members one by one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Draw:
    """Coordinates of the random numbers of one step; counter-based, so nothing random is saved or sent.

    ``seed``: 64 bits, the key of the random stream (see :func:`gradcomp.kernels.philox.uniform`). ``step``, ``rank``:
    32 bits, words of the random counter.
    """

    seed: int
    step: int
    rank: int


class Shapes(NamedTuple):
    """Layers as matrices: n, m and r of each, as int64."""

    rows: Int64s
    columns: Int64s
    ranks: Int64s


class Factor(NamedTuple):
    """P, n x r, or Q, m x r, of every layer, *column by column*: each column is contiguous.

    ``values``: float32, flat. ``at``: int64, the element of ``values`` at which each layer's factor begins.
    """

    values: Floats
    at: Int64s
