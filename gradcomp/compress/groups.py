"""From layers and their compressors to the table of a group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gradcomp.compress.base import Compressor
from gradcomp.core.layers import LayerSpec
from gradcomp.kernels.codec import Group
from gradcomp.kernels.segments import DTYPES, SEGMENT

_DTYPE_NUMBERS = {dtype.name: number for number, dtype in enumerate(DTYPES)}


@dataclass(frozen=True)
class Piece:
    """``length`` elements of layer number ``layer``, from element ``start``."""

    layer: int
    start: int
    length: int


def group_of(
    pieces: Sequence[Piece], layers: Sequence[LayerSpec], compressors: Sequence[Compressor]
) -> Group:
    """Pieces of layers of one family and dtype, each at its own level; addresses are left to whoever makes a call."""
    table = np.zeros(len(pieces), dtype=SEGMENT)
    for row, piece in enumerate(pieces):
        compressor, spec = compressors[piece.layer], layers[piece.layer]
        one = table[row : row + 1]
        one["start"], one["length"] = piece.start, piece.length
        one["layer"], one["dtype"] = spec.hash, _DTYPE_NUMBERS[spec.dtype]
        compressor.fill(one, compressor.level)
    first = compressors[pieces[0].layer]
    return Group(
        first,
        table,
        np.array([p.layer for p in pieces], dtype=np.int64),
        first.keeps_residual,
        first.residual_decay,
        tuple(layers[p.layer].shape for p in pieces),
        first.follows_rate,
        first.momentum > 0 or first.clip_norm is not None,
    )
