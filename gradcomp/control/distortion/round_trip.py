"""Runs one layer through one compressor and back, on one rank and without a transport, for its result or its speed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from time import perf_counter

import numpy as np

from gradcomp.compress.base import Compressor
from gradcomp.compress.groups import Piece, group_of
from gradcomp.compress.messages import Broadcast, Exchange, Gather, Message, Reduce, Reply, Sum
from gradcomp.compress.sparse.base import Sparse
from gradcomp.compress.sparse.drawn import Summed
from gradcomp.core.layers import LayerSpec
from gradcomp.core.state import Fields
from gradcomp.core.vectors import Floats
from gradcomp.kernels.codec import Bytes, Draw, Group
from gradcomp.kernels.step import StepContext

_PROBE = LayerSpec("probe", (512, 512))
_REPEATS, _PATIENCE_SECONDS = 6, 0.5
_LEAST_SECONDS = 1e-9  # so that no rate is infinite


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
    flags = np.zeros(len(group.table), dtype=np.uint8)
    _run(compressor.exchange(group, context), context, flags)
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


def _run(exchange: Exchange, context: StepContext, flags: Bytes) -> float:
    """Runs an exchange, whose flags it adds, and returns the seconds that its messages took to make."""
    making = 0.0
    try:
        message = next(exchange)
        while True:
            reply, seconds = answer(message, context)
            making += seconds
            flags |= reply.flags
            message = exchange.send(Reply(flags.copy(), reply.data))
    except StopIteration as end:
        flags |= end.value
    return making


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
    memory = np.empty(message.max_bytes, dtype=np.uint8)
    begin = perf_counter()
    flags, used = message.write_at_once(memory) if isinstance(message, Gather) else message.write(memory)
    seconds = perf_counter() - begin
    payload = memory[:used]
    return Reply(flags, [payload] if isinstance(message, Gather) else payload), seconds


def _coded(message: Reduce, context: StepContext) -> tuple[Reply, float]:
    codec, group = message.codec, message.group
    sizes = codec.wire_bytes(group.table)
    payload = np.empty(int(sizes.sum()), dtype=np.uint8)
    for table in (group.table, group.inputs):
        table["payload"] = np.cumsum(sizes) - sizes
    flags = np.zeros(len(group.table), dtype=np.uint8)
    begin = perf_counter()
    codec.encode(group.device, group.inputs, payload, flags, context.draw)
    seconds = perf_counter() - begin
    codec.decode(group.device, group.table, payload, flags)
    if group.joined is not None:
        assert message.rest is not None, "means of a vector are copied to its layers"
        message.rest["output"] = 0  # the only layer is the vector, and its mean is in place
    elif message.rest is not None:
        message.rest["output"] = group.table["output"] + 4 * group.table["length"].astype(np.uint64)
    return Reply(flags), seconds


# --- speed --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rates:
    """Speeds of a compressor: bytes of float32 that it encodes, and decodes, a second."""

    encode: float
    decode: float


def measure_rates(compressor: Compressor) -> Rates:
    """Returns the bytes of float32 that a compressor encodes, and decodes, in a second.

    One rank alone exchanges a matrix of 1 MiB up to 6 times; no exchange begins after half a second. Making messages
    counts as encoding, all other time as decoding. The shortest encoding and the shortest decoding count, since
    training runs at the same time. The memory is about 5 MiB and the payload.
    """
    group = group_of([Piece(0, 0, _PROBE.size)], [_PROBE], [compressor])
    values = np.random.default_rng(0).standard_normal(_PROBE.size).astype(np.float32)
    output, residual, next_residual = (np.zeros_like(values) for _ in range(3))
    offsets = 4 * group.table["start"]
    group.table["gradient"] = values.ctypes.data + offsets
    group.table["output"] = output.ctypes.data + offsets
    if group.feedback or compressor.traits.contributes:
        group.table["next_residual"] = next_residual.ctypes.data + offsets
    if group.feedback:
        group.table["residual"] = residual.ctypes.data + offsets
    fields = Fields(1)
    fields.arrange([compressor.fields(_PROBE, 0)])
    context = StepContext(Draw(0, 0, 0), 1, fields=fields)
    seconds: list[tuple[float, float]] = []
    deadline = perf_counter() + _PATIENCE_SECONDS
    while len(seconds) < _REPEATS and (not seconds or perf_counter() < deadline):
        flags, begin = np.zeros(len(group.table), dtype=np.uint8), perf_counter()
        making = _run(compressor.exchange(group, context), context, flags)
        seconds.append((making, perf_counter() - begin - making))
    encode, decode = np.maximum(np.array(seconds).min(axis=0), _LEAST_SECONDS).tolist()
    return Rates(values.nbytes / encode, values.nbytes / decode)
