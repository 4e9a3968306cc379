"""Runs one layer through one compressor and back, on one rank and without a transport."""

from __future__ import annotations

from dataclasses import replace
from time import perf_counter

import numpy as np
import numpy.typing as npt

from gradcomp.compress.base import Compressor
from gradcomp.compress.groups import Piece, group_of
from gradcomp.compress.messages import Broadcast, Gather, Message, Reduce, Reply, Sum
from gradcomp.compress.sparse.base import Sparse
from gradcomp.compress.sparse.drawn import Summed
from gradcomp.core.layers import LayerSpec
from gradcomp.core.state import Fields
from gradcomp.kernels.codec import Draw, Group
from gradcomp.kernels.step import StepContext

Floats = npt.NDArray[np.float32]


def round_trip(
    compressor: Compressor, layer: LayerSpec, values: Floats, seed: int, fields: Fields | None = None
) -> Floats | None:
    """Returns decompress(compress(values)), as one rank alone would get it for its gradient.

    There is no residual, no momentum and no clipping, and a reduction's second coding of the mean is left out.

    Args:
        compressor: without wrappers, see `Compressor.bare`; at the level to be tried.
        layer: only its shape is used: values go in and out as float32.
        values: float32, flat and contiguous; only read.
        seed: seeds random draws; the step is 0.
        fields: the compressor's state of layer 0, read and written but not committed; new state if it is None.

    Returns:
        float32, flat; None if the compressor found that its result would not be finite.
    """
    if compressor.traits.masks_momentum:  # sets the sent elements of the values to zero
        values = values.copy()
    if fields is None:
        fields = Fields(1)
        fields.arrange([{**compressor.fields(layer, seed), **compressor.shared_fields(seed, 1)}])
    given = np.empty(layer.size, dtype=np.float32)
    next_residual = np.empty(layer.size if compressor.traits.contributes else 0, dtype=np.float32)
    group = _group(compressor, layer)
    for table in (group.table, group.inputs):
        offsets = 4 * table["start"]
        table["gradient"], table["output"] = values.ctypes.data + offsets, given.ctypes.data + offsets
        table["next_residual"] = next_residual.ctypes.data + offsets if compressor.traits.contributes else 0
    context = StepContext(Draw(seed, 0, 0), 1, fields=fields)
    exchange = compressor.exchange(group, context)
    flags = np.zeros(len(group.table), dtype=np.uint8)
    try:
        message = next(exchange)
        while True:
            reply, _ = answer(message, context)
            flags |= reply.flags
            message = exchange.send(Reply(flags.copy(), reply.data))
    except StopIteration as end:
        flags |= end.value
    return None if flags.any() else given


def round_trip_bytes(compressor: Compressor, layer: LayerSpec) -> int:
    """Estimates the memory of a round trip.

    It is that of the result, the contribution and three payloads, and twice the selected elements and their coding
    error.
    """
    group = _group(compressor, layer)
    arrays = 2 if compressor.traits.contributes else 1
    selected = int(compressor.limits(group.table).sum()) if isinstance(compressor, Sparse | Summed) else 0
    return 4 * arrays * layer.size + 3 * int(compressor.wire_bytes(group).sum()) + 24 * selected


def _group(compressor: Compressor, layer: LayerSpec) -> Group:
    spec = replace(layer, dtype="float32")
    return replace(group_of([Piece(0, 0, layer.size)], [spec], [compressor]), feedback=False, prepared=False)


def answer(message: Message, context: StepContext) -> tuple[Reply, float]:
    """Answers a message as a world of one would; also returns the seconds that encoding the message took."""
    if isinstance(message, Reduce):
        return _coded(message, context)
    if isinstance(message, Sum):
        summand = np.zeros(message.length, dtype=message.dtype)
        begin = perf_counter()
        flags = message.write(summand)
        return Reply(flags, summand), perf_counter() - begin
    assert isinstance(message, Gather | Broadcast), f"there is no message {message!r}"
    room = np.empty(message.max_bytes, dtype=np.uint8)
    begin = perf_counter()
    flags, used = message.write_at_once(room) if isinstance(message, Gather) else message.write(room)
    seconds = perf_counter() - begin
    payload = room[:used]
    return Reply(flags, [payload] if isinstance(message, Gather) else payload), seconds


def _coded(message: Reduce, context: StepContext) -> tuple[Reply, float]:
    codec, group = message.codec, message.group
    sizes = codec.wire_bytes(group.table)
    payload = np.empty(int(sizes.sum()), dtype=np.uint8)
    for table in (group.table, group.inputs):
        table["payload"] = np.cumsum(sizes) - sizes
    flags = np.zeros(len(group.table), dtype=np.uint8)
    begin = perf_counter()
    codec.encode(group.inputs, payload, flags, context.draw)
    seconds = perf_counter() - begin
    codec.decode(group.table, payload, flags)
    return Reply(flags), seconds
