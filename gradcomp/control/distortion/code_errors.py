"""Measures coding errors of a layer, or of every block of it, for many codes at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gradcomp.compress.base import Coded, Compressor
from gradcomp.control.base import Doubles, Numbers
from gradcomp.control.distortion import Budget, Subject, energies, segment
from gradcomp.core.layers import LayerSpec
from gradcomp.core.vectors import Floats, HostVector, Vector
from gradcomp.kernels.codec import Bytes, Codec, Draw, Table
from gradcomp.kernels.cuda.measures import LARGEST_BUCKET
from gradcomp.kernels.devices import HOST, Device
from gradcomp.kernels.segments import ALLOCATED, FLOAT32, MINMAX, SEGMENT, UNIT_BYTES

#: Elements coded at a time: few enough that their errors are still in the cache when they are summed.
_PIECE = 1 << 15


def code_errors(choices: Sequence[Coded], subject: Subject) -> Doubles:
    """Returns ||values - decode(encode(values))|| of every choice; inf where the decoded value would not be finite.

    Encoding also writes the error, so nothing is decoded. A layer is coded in pieces that end where
    slices may end, which changes no code; each piece is coded at all levels of one kernel in one call. Values on a
    device are measured there, for all levels in one read, unless too many elements share a scale.

    Each choice takes 4 bytes and a code for each of 32,768 elements, or for the whole layer if its elements share a
    scale or its scales a unit. Raises ConfigError if the budget does not allow one such piece of the smallest possible
    size.
    """
    values, found, table = subject.flat, np.zeros(len(choices)), _levels(choices, subject.layer)
    table["length"] = subject.layer.size
    alike: dict[tuple[int, bool, int, int], tuple[Codec, list[int]]] = {}
    for i, choice in enumerate(choices):
        codec = _codec(choice, table[i : i + 1])
        key = codec.kind, codec.stochastic, id(codec.magnitudes), choice.cut_elements(subject.layer)
        alike.setdefault(key, (codec, []))[1].append(i)
    draw = Draw(subject.seed, 0, 0)
    device = subject.device
    for (*_, cut), (codec, rows) in alike.items():
        if device.driver is not None and cut <= LARGEST_BUCKET:
            whole = table[rows[:1]]
            whole["gradient"], whole["length"] = values.address, values.size
            found[rows] = _on_device(device, codec, whole, table["level"][rows], draw)[0]
            continue
        smallest = values.size if codec.kind in UNIT_BYTES else min(cut, values.size)
        at_once, piece = _portions(codec, table[rows], smallest, subject.budget)
        for first in range(0, len(rows), at_once):
            some = rows[first : first + at_once]
            found[some] = _lost(codec, table[some], subject.values, piece, draw)
    return found


def _levels(choices: Sequence[Compressor], layer: LayerSpec) -> Table:
    """Returns a table with the layer at the level of every choice."""
    table = np.zeros(len(choices), dtype=SEGMENT)
    table["layer"], table["dtype"] = layer.hash, FLOAT32
    for i, choice in enumerate(choices):
        choice.fill(table[i : i + 1], choice.level)
    return table


def _codec(choice: Coded, row: Table) -> Codec:
    codec = choice.codec_for(row)
    # The error of allocated bits counts as that of MINMAX at the same level.
    return Codec(MINMAX, codec.stochastic) if codec.kind in ALLOCATED else codec


def _on_device(device: Device, codec: Codec, rows: Table, levels: Numbers, draw: Draw) -> Doubles:
    """Returns the coding errors of values on a device, by row and level; it reads them once for all levels."""
    draws = draw if codec.stochastic else None
    lost: Doubles = device.kernels.losses(codec.kind, rows, levels, draw=draws, magnitudes=codec.magnitudes)
    return np.sqrt(lost)


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
    table["length"] = piece = min(piece, len(values))
    lost, payload = np.empty(len(table) * piece, dtype=np.float32), _payload(codec, table)
    found = np.zeros(len(table))
    _place(codec, table, lost)
    for start in range(0, len(values), piece):
        table["gradient"], table["start"] = values.ctypes.data + 4 * start, start
        table["length"] = min(piece, len(values) - start)
        found += _energies(codec, table, draw, payload)
    return np.sqrt(found)


def _payload(codec: Codec, rows: Table) -> Bytes:
    return np.empty(int(codec.wire_bytes(rows).sum()), dtype=np.uint8)


def _place(codec: Codec, rows: Table, lost: Floats) -> None:
    """Gives each row its place among the errors in ``lost`` and among the codes; shorter rows fit there too."""
    rows["next_residual"] = lost.ctypes.data + 4 * (np.cumsum(rows["length"]) - rows["length"])
    sizes = codec.wire_bytes(rows)
    rows["payload"] = np.cumsum(sizes) - sizes


def _energies(codec: Codec, rows: Table, draw: Draw, payload: Bytes) -> Doubles:
    """Returns the squared norm of the coding error of each row, which has been placed."""
    flags = np.zeros(len(rows), dtype=np.uint8)
    codec.encode(HOST, rows, payload, flags, draw)
    losses = np.zeros(len(rows), dtype=SEGMENT)
    losses["gradient"], losses["length"], losses["dtype"] = rows["next_residual"], rows["length"], FLOAT32
    return np.where(flags != 0, np.inf, energies(losses))


def block_errors(
    choices: Sequence[Compressor],
    layer: LayerSpec,
    values: Vector,
    begins: Numbers,
    seed: int,
    memory_bytes: int | None = None,
    device: Device = HOST,
) -> Doubles:
    """Returns ||values - decode(encode(values))|| of every block and choice, shape (B, K).

    ``choices``: levels of one compressor that has levels by block. ``begins``: elements at which the blocks begin.
    Random draws are those of the layer, so the squares of the blocks add up to the square of :func:`errors`.

    Blocks are coded in calls of 32,768 elements, larger ones in several calls, with all levels in each call. This takes
    4 bytes and a code for each choice and element of a call; ``memory_bytes`` makes calls smaller. Values on a device
    are measured there. Returns inf where the decoded value would not be finite; all NaN if a value is not finite.
    Raises ConfigError if not even one quantisation bucket fits at all levels.
    """
    assert isinstance(values, HostVector) == (device.driver is None), "the device is that of the values"
    bare = [choice.bare() for choice in choices]
    levels, cut, first = _levels(bare, layer), bare[0].cut_elements(layer), bare[0]
    assert isinstance(first, Coded), "levels by block are levels of codes"
    codec = _codec(first, levels[:1])
    ends = np.append(begins[1:], layer.size)
    if not np.isfinite(energies(segment(values.address, layer.size), device)[0]):
        return np.full((len(begins), len(bare)), np.nan)
    draw = Draw(seed, 0, 0)
    if device.driver is not None and cut <= LARGEST_BUCKET:
        rows = _rows(levels[:1], begins, ends, values.address)
        return _on_device(device, codec, rows, levels["level"], draw)
    smallest = levels.copy()
    smallest["length"] = min(cut, layer.size)
    each = int(codec.wire_bytes(smallest).sum()) + 4 * int(smallest["length"].sum())
    budget = Budget(memory_bytes, f"what {first.name} would lose of blocks of layer {layer.name!r}")
    budget.require(each)
    most = _PIECE // cut if memory_bytes is None else min(_PIECE // cut, memory_bytes // each)
    most = max(most, 1)
    here = values.read()
    blocks, starts, stops = _pieces(begins, ends, most * cut)
    found = np.zeros((len(begins), len(bare)))
    at = 0
    while at < len(blocks):
        upto = max(int(np.searchsorted(stops, starts[at] + most * cut, side="right")), at + 1)
        rows = _rows(levels, starts[at:upto], stops[at:upto], here.ctypes.data)
        lost = np.empty(int(rows["length"].sum()), dtype=np.float32)
        _place(codec, rows, lost)
        of_rows = _energies(codec, rows, draw, _payload(codec, rows))
        np.add.at(found, blocks[at:upto], of_rows.reshape(upto - at, len(bare)))
        at = upto
    return np.sqrt(found)


def _pieces(begins: Numbers, ends: Numbers, most: int) -> tuple[Numbers, Numbers, Numbers]:
    """Splits blocks into pieces of at most ``most`` elements: returns the block, begin and end of each piece."""
    counts = -(-(ends - begins) // most)
    blocks = np.repeat(np.arange(len(begins)), counts)
    within = np.arange(len(blocks)) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = begins[blocks] + within * most
    return blocks, starts, np.minimum(starts + most, ends[blocks])


def _rows(levels: Table, starts: Numbers, stops: Numbers, address: int) -> Table:
    """Returns a table with every piece at every level, piece by piece."""
    rows = np.tile(levels, len(starts))
    rows["start"] = np.repeat(starts, len(levels))
    rows["length"] = np.repeat(stops - starts, len(levels))
    rows["gradient"] = address + 4 * rows["start"]
    return rows
