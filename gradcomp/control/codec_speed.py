"""Measures how fast compressors are on this machine."""

from __future__ import annotations

from time import perf_counter

import numpy as np

from gradcomp.compress import Compressor
from gradcomp.compress.groups import Piece, group_of
from gradcomp.compress.messages import Exchange
from gradcomp.control.distortion.round_trip import answer
from gradcomp.control.forecast import Rates
from gradcomp.core.layers import LayerSpec
from gradcomp.core.state import Fields
from gradcomp.kernels.codec import Draw
from gradcomp.kernels.step import StepContext

_LAYER = LayerSpec("probe", (512, 512))
_REPEATS, _PATIENCE_SECONDS = 6, 0.5
_LEAST_SECONDS = 1e-9  # so that no rate is infinite


def measure_rates(compressor: Compressor) -> Rates:
    """Returns the bytes of float32 that a compressor encodes, and decodes, in a second.

    One rank alone exchanges a matrix of 1 MiB up to 6 times; no exchange begins after half a second. Making messages
    counts as encoding, all other time as decoding. The shortest encoding and the shortest decoding count, since
    training runs at the same time. The memory is about 5 MiB and the payload.
    """
    group = group_of([Piece(0, 0, _LAYER.size)], [_LAYER], [compressor])
    values = np.random.default_rng(0).standard_normal(_LAYER.size).astype(np.float32)
    output, residual, next_residual = (np.zeros_like(values) for _ in range(3))
    offsets = 4 * group.table["start"]
    group.table["gradient"] = values.ctypes.data + offsets
    group.table["output"] = output.ctypes.data + offsets
    if group.feedback or compressor.traits.contributes:
        group.table["next_residual"] = next_residual.ctypes.data + offsets
    if group.feedback:
        group.table["residual"] = residual.ctypes.data + offsets
    fields = Fields(1)
    fields.arrange([compressor.fields(_LAYER, 0)])
    context = StepContext(Draw(0, 0, 0), 1, fields=fields)
    seconds: list[tuple[float, float]] = []
    deadline = perf_counter() + _PATIENCE_SECONDS
    while len(seconds) < _REPEATS and (not seconds or perf_counter() < deadline):
        seconds.append(_seconds(compressor.exchange(group, context), context))
    encode, decode = np.maximum(np.array(seconds).min(axis=0), _LEAST_SECONDS).tolist()
    return Rates(values.nbytes / encode, values.nbytes / decode)


def _seconds(exchange: Exchange, context: StepContext) -> tuple[float, float]:
    """Runs one exchange, and returns the seconds spent on making messages and the rest."""
    inside, begin = 0.0, perf_counter()
    try:
        message = next(exchange)
        while True:
            reply, seconds = answer(message, context)
            inside += seconds
            message = exchange.send(reply)
    except StopIteration:
        return inside, perf_counter() - begin - inside
