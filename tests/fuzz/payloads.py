"""One payload of a compressor, mutated, given back to it as what another rank sent."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import numpy as np
from configurations import ROWS
from fuzz.mutations import mutate

from gradcomp import Compressor, GradcompError, LayerSpec
from gradcomp.compress.groups import Piece, group_of
from gradcomp.compress.messages import Broadcast, Gather, Message, Reduce, Reply, Sum
from gradcomp.core.state import Fields
from gradcomp.kernels.codec import Draw
from gradcomp.kernels.step import StepContext

_SHAPES = ((1,), (7,), (64,), (301,), (16, 24), (5, 3, 4))
_GUARD, _GUARD_VALUE = 16, 777.0


@cache
def _compressors() -> list[tuple[str, Compressor]]:
    """Those that code gradients themselves, without the wrappers that change gradients before."""
    rows = [(name, row.compressor.bare()) for name, row in ROWS.items()]
    return list({str(compressor): (name, compressor) for name, compressor in rows}.values())


def run(seed: int) -> str:
    """What was found with this seed: nothing, or a line that says what."""
    r = random.Random(f"payload {seed}")
    name, compressor = r.choice(_compressors())
    shape = r.choice(_SHAPES)
    layer = LayerSpec("layer", shape)
    generator = np.random.default_rng(seed)
    gradient = (generator.standard_normal(layer.size) * 10.0 ** r.randint(-6, 6)).astype(np.float32)
    memory = np.full(layer.size + 2 * _GUARD, _GUARD_VALUE, np.float32)
    output = memory[_GUARD:-_GUARD]
    next_residual = np.zeros(layer.size if compressor.traits.contributes else 0, np.float32)
    fields = Fields(1)
    fields.arrange([compressor.fields(layer, seed)])
    group = replace(
        group_of([Piece(0, 0, layer.size)], [layer], [compressor]), feedback=False, prepared=False
    )
    for table in (group.table, group.inputs):
        offsets = 4 * table["start"]
        table["gradient"], table["output"] = gradient.ctypes.data + offsets, output.ctypes.data + offsets
        table["next_residual"] = next_residual.ctypes.data + offsets if compressor.traits.contributes else 0
    context = StepContext(Draw(seed, 0, 0), 2, fields=fields)
    try:
        flags = _exchange(r, compressor, group, context)
    except GradcompError:
        flags = np.ones(1, np.uint8)
    except Exception as error:  # noqa: BLE001 - what may be raised is the question
        return f"{name} {shape}: {type(error).__name__}: {error}"
    if (memory[:_GUARD] != _GUARD_VALUE).any() or (memory[-_GUARD:] != _GUARD_VALUE).any():
        return f"{name} {shape}: wrote beside the output"
    if not flags.any() and not np.isfinite(output).all():
        return f"{name} {shape}: a mean that is not finite, and no flag"
    return ""


def _exchange(r: random.Random, compressor: Compressor, group, context: StepContext) -> np.ndarray:
    exchange = compressor.exchange(group, context)
    flags = np.zeros(len(group.table), np.uint8)
    try:
        message = next(exchange)
        while True:
            reply = _answer(r, message, context)
            flags |= reply.flags
            message = exchange.send(Reply(flags.copy(), reply.data))
    except StopIteration as end:
        flags |= end.value
    return flags


def _answer(r: random.Random, message: Message, context: StepContext) -> Reply:
    """What the pipeline would answer, had another rank sent the same, and the network changed it."""
    if isinstance(message, Reduce):
        return _reduce(r, message, context)
    if isinstance(message, Sum):
        summand = np.zeros(message.length, dtype=message.dtype)
        flags = message.write(summand)
        return Reply(flags, 2 * summand)  # added by the transport: there is no payload to change
    assert isinstance(message, Gather | Broadcast)
    room = np.zeros(message.max_bytes, dtype=np.uint8)
    flags, used = message.write(room)
    payload = room[:used]
    changed = mutate(r, payload, same_length=message.fixed)[: message.max_bytes]
    return Reply(flags, [payload.copy(), changed] if isinstance(message, Gather) else changed)


def _reduce(r: random.Random, message: Reduce, context: StepContext) -> Reply:
    codec, group = message.codec, message.group
    sizes = codec.wire_bytes(group.table)
    payload = np.zeros(int(sizes.sum()), np.uint8)
    for table in (group.table, group.inputs):
        table["payload"] = np.cumsum(sizes) - sizes
    flags = np.zeros(len(group.table), np.uint8)
    codec.encode(group.device, group.inputs, payload, flags, context.draw)
    changed = mutate(r, payload, same_length=True)  # a transport refuses any other
    mean = np.zeros_like(payload)
    table = group.inputs.copy()
    table["gradient"], table["next_residual"] = 0, 0
    codec.reduce(group.device, table, [payload, changed], mean, flags, context.draw, context.divisor)
    codec.decode(group.device, group.table, r.choice((changed, mean)), flags)
    return Reply(flags)
