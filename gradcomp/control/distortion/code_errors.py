"""Measures coding errors of a layer, for many codes at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gradcomp.compress.base import Coded
from gradcomp.control.distortion.budget import Budget
from gradcomp.core.layers import LayerSpec
from gradcomp.core.vectors import Floats, Vector
from gradcomp.kernels import bodies, selection
from gradcomp.kernels.codec import Codec, Draw, Table
from gradcomp.kernels.cuda.measures import LARGEST_BUCKET
from gradcomp.kernels.segments import ALLOCATED, FLOAT32, MINMAX, SEGMENT, UNIT_BYTES

Doubles = npt.NDArray[np.float64]

#: Elements coded at a time: few enough that their errors are still in the cache when they are summed.
_PIECE = 1 << 15


def code_errors(
    choices: Sequence[Coded], layer: LayerSpec, values: Vector, seed: int, budget: Budget
) -> Doubles:
    """Returns ||values - decode(encode(values))|| of every choice; inf where the decoded value would not be finite.

    Encoding writes the error beside the payload, so nothing is decoded. A layer is coded in pieces that end where
    slices may end, which changes no code; each piece is coded at all levels of one kernel in one call. Values on a
    device are measured there, for all levels in one read, unless too many elements share a scale.

    Each choice takes 4 bytes and a code for each of 32,768 elements, or for the whole layer if its elements share a
    scale or its scales a unit. Raises ConfigError if the budget does not allow one such piece of the smallest possible
    size.
    """
    found = np.zeros(len(choices))
    table = np.zeros(len(choices), dtype=SEGMENT)
    table["layer"], table["dtype"], table["length"] = layer.hash, FLOAT32, layer.size
    alike: dict[tuple[int, bool, int, int], tuple[Codec, list[int]]] = {}
    for i, choice in enumerate(choices):
        choice.fill(table[i : i + 1], choice.level)
        codec = choice.codec_for(table[i : i + 1])
        if codec.kind in ALLOCATED:  # its error counts as that of MINMAX at the same level
            codec = Codec(MINMAX, codec.stochastic)
        key = codec.kind, codec.stochastic, id(codec.magnitudes), choice.cut_elements(layer)
        alike.setdefault(key, (codec, []))[1].append(i)
    draw = Draw(seed, 0, 0)
    device = bodies.on_device(values.address)
    here: Floats | None = None
    for (*_, cut), (codec, rows) in alike.items():
        if device is not None and cut <= LARGEST_BUCKET:
            found[rows] = _lost_on(device, codec, table[rows], values, draw)
            continue
        here = values.read() if here is None else here
        smallest = values.size if codec.kind in UNIT_BYTES else min(cut, values.size)
        at_once, piece = _portions(codec, table[rows], smallest, budget)
        for first in range(0, len(rows), at_once):
            some = rows[first : first + at_once]
            found[some] = _lost(codec, table[some], here, piece, draw)
    return found


def _lost_on(device: Any, codec: Codec, table: Table, values: Vector, draw: Draw) -> Doubles:
    """Returns the coding errors of values on a device, which reads them once for all rows."""
    whole = table[:1].copy()
    whole["gradient"], whole["length"] = values.address, values.size
    energies: Doubles = device.losses(
        codec.kind,
        whole,
        table["level"],
        draw=draw if codec.stochastic else None,
        magnitudes=codec.magnitudes,
    )[0]
    return np.sqrt(energies)


def _portions(codec: Codec, rows: Table, cut: int, budget: Budget) -> tuple[int, int]:
    """Returns the number of rows coded at once, and the number of elements of each."""
    smallest = rows.copy()
    smallest["length"] = cut
    # The smallest piece takes its errors, in float32, and its payload.
    each = 4 * cut + int(codec.wire_bytes(smallest).max())
    budget.require(each)
    allowed = max(1, len(rows) * _PIECE // cut)
    if budget.nbytes is not None:
        allowed = min(allowed, budget.nbytes // each)
    at_once = min(len(rows), allowed)
    return at_once, cut * (allowed // at_once)


def _lost(codec: Codec, table: Table, values: Floats, piece: int, draw: Draw) -> Doubles:
    """Returns the norm of the coding error of each row."""
    piece = min(piece, len(values))
    lost = np.empty((len(table), piece), dtype=np.float32)
    table["next_residual"] = lost.ctypes.data + lost.strides[0] * np.arange(len(table))
    table["length"] = piece
    sizes = codec.wire_bytes(table)
    table["payload"] = np.cumsum(sizes) - sizes
    payload = np.empty(int(sizes.sum()), dtype=np.uint8)
    losses = np.zeros(len(table), dtype=SEGMENT)
    losses["gradient"], losses["dtype"] = table["next_residual"], FLOAT32

    flags = np.zeros(len(table), dtype=np.uint8)
    energies, more = np.zeros(len(table)), np.empty(len(table))
    for start in range(0, len(values), piece):
        table["gradient"], table["start"] = values.ctypes.data + 4 * start, start
        table["length"] = losses["length"] = min(piece, len(values) - start)
        codec.encode(table, payload, flags, draw)
        selection.squares(losses, more)
        energies += more
    return np.where(flags != 0, np.inf, np.sqrt(energies))
