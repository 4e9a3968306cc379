"""Measures coding errors of a layer, or of every block of it, for many codes at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gradcomp.compress.base import Coded, Compressor
from gradcomp.control.distortion.budget import Budget
from gradcomp.core.layers import LayerSpec
from gradcomp.core.vectors import Floats, Vector
from gradcomp.kernels import dispatch, selection
from gradcomp.kernels.codec import Codec, Draw, Sizes, Table
from gradcomp.kernels.cuda.measures import LARGEST_BUCKET
from gradcomp.kernels.segments import ALLOCATED, FLOAT32, MINMAX, SEGMENT, UNIT_BYTES

Doubles = npt.NDArray[np.float64]

#: Elements coded at a time: few enough that their errors are still in the cache when they are summed.
_PIECE = 1 << 15

#: Elements coded in one call: few enough that their errors are still in the cache when they are summed.
_AT_ONCE = 1 << 15


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
    device = dispatch.on_device(values.address)
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


def block_errors(
    choices: Sequence[Compressor],
    layer: LayerSpec,
    values: Vector,
    begins: Sizes,
    seed: int,
    memory_bytes: int | None = None,
) -> Doubles:
    """Returns ||values - decode(encode(values))|| of every block and choice, shape (B, K).

    ``choices``: levels of one compressor that has levels by block. ``begins``: elements at which the blocks begin.
    Random draws are those of the layer, so the squares of the blocks add up to the square of :func:`errors`.

    Blocks are coded in calls of 32,768 elements, larger ones in several calls, with all levels in each call. This takes
    4 bytes and a code for each choice and element of a call; ``memory_bytes`` makes calls smaller. Values on a device
    are measured there. Returns inf where the decoded value would not be finite; all NaN if a value is not finite.
    Raises ConfigError if not even one quantisation bucket fits at all levels.
    """
    bare = [choice.bare() for choice in choices]
    levels, cut = np.zeros(len(bare), dtype=SEGMENT), bare[0].cut_elements(layer)
    levels["layer"], levels["dtype"] = layer.hash, FLOAT32
    for i, choice in enumerate(bare):
        choice.fill(levels[i : i + 1], choice.level)
    first = bare[0]
    assert isinstance(first, Coded), "levels by block are levels of codes"
    codec = first.codec_for(levels[:1])
    if codec.kind in ALLOCATED:  # its error counts as that of MINMAX at the same level
        codec = Codec(MINMAX, codec.stochastic)
    ends = np.append(begins[1:], layer.size)
    whole = np.zeros(1, dtype=SEGMENT)
    whole["gradient"], whole["length"], whole["dtype"] = values.address, layer.size, FLOAT32
    energy = np.zeros(1)
    selection.squares(whole, energy)
    if not np.isfinite(energy[0]):
        return np.full((len(begins), len(bare)), np.nan)
    draw = Draw(seed, 0, 0)
    device = dispatch.on_device(values.address)
    if device is not None and cut <= LARGEST_BUCKET:
        rows = _rows(levels[:1], begins, ends, values.address)
        energies: Doubles = device.losses(
            codec.kind,
            rows,
            levels["level"],
            draw=draw if codec.stochastic else None,
            magnitudes=codec.magnitudes,
        )
        return np.sqrt(energies)
    smallest = levels.copy()
    smallest["length"] = min(cut, layer.size)
    each = int(codec.wire_bytes(smallest).sum()) + 4 * int(smallest["length"].sum())
    budget = Budget(memory_bytes, f"what {first.name} would lose of blocks of layer {layer.name!r}")
    budget.require(each)
    most = _AT_ONCE // cut if memory_bytes is None else min(_AT_ONCE // cut, memory_bytes // each)
    most = max(most, 1)
    here = values.read()
    blocks, starts, stops = _pieces(begins, ends, most * cut)
    found = np.zeros((len(begins), len(bare)))
    at = 0
    while at < len(blocks):
        upto = max(int(np.searchsorted(stops, starts[at] + most * cut, side="right")), at + 1)
        rows = _rows(levels, starts[at:upto], stops[at:upto], here.ctypes.data)
        np.add.at(found, blocks[at:upto], _lost_of_blocks(codec, rows, draw).reshape(upto - at, len(bare)))
        at = upto
    return np.sqrt(found)


def _pieces(begins: Sizes, ends: Sizes, most: int) -> tuple[Sizes, Sizes, Sizes]:
    """Splits blocks into pieces of at most ``most`` elements: returns the block, begin and end of each piece."""
    counts = -(-(ends - begins) // most)
    blocks = np.repeat(np.arange(len(begins)), counts)
    within = np.arange(len(blocks)) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = begins[blocks] + within * most
    return blocks, starts, np.minimum(starts + most, ends[blocks])


def _rows(levels: Table, starts: Sizes, stops: Sizes, address: int) -> Table:
    """Returns a table with every piece at every level, piece by piece."""
    rows = np.tile(levels, len(starts))
    rows["start"] = np.repeat(starts, len(levels))
    rows["length"] = np.repeat(stops - starts, len(levels))
    rows["gradient"] = address + 4 * rows["start"]
    return rows


def _lost_of_blocks(codec: Codec, rows: Table, draw: Draw) -> Doubles:
    """Returns the squared norm of the coding error of each row."""
    ends = np.cumsum(rows["length"])
    lost = np.empty(int(ends[-1]), dtype=np.float32)
    rows["next_residual"] = lost.ctypes.data + 4 * (ends - rows["length"])
    sizes = codec.wire_bytes(rows)
    rows["payload"] = np.cumsum(sizes) - sizes
    flags = np.zeros(len(rows), dtype=np.uint8)
    codec.encode(rows, np.empty(int(sizes.sum()), dtype=np.uint8), flags, draw)
    losses = np.zeros(len(rows), dtype=SEGMENT)
    losses["gradient"], losses["length"], losses["dtype"] = rows["next_residual"], rows["length"], FLOAT32
    energies = np.zeros(len(rows))
    selection.squares(losses, energies)
    return np.where(flags != 0, np.inf, energies)
