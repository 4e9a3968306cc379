"""One function per kernel; `reference` defines them, the compiled body is used where it was built.

The functions take a segment table (see `segments`) and serve a whole group per call; `reference` documents
each.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from gradcomp.kernels import bodies
from gradcomp.kernels.bodies import body, use
from gradcomp.kernels.pending import DONE, Again, Pending
from gradcomp.kernels.segments import (
    BF16,
    BFLOAT16,
    CODEBOOK_L2,
    CODEBOOK_LINF,
    CODEBOOKS,
    DTYPES,
    FLOAT16,
    FLOAT32,
    FLOAT64,
    FP16,
    FP32,
    FP64,
    L2,
    LEVELS,
    LINF,
    MAGNITUDES_SHAPE,
    MAX_ELEMENTS,
    MINMAX,
    ONEBIT,
    OWNER_RANK,
    QUANTISERS,
    SEGMENT,
    SIGN,
    STOCHASTIC,
    VOTE,
    Bytes,
    Magnitudes,
    SegmentTable,
    wire_bytes,
    wire_bytes_table,
)

__all__ = [
    "BF16",
    "BFLOAT16",
    "CODEBOOKS",
    "CODEBOOK_L2",
    "CODEBOOK_LINF",
    "DTYPES",
    "FLOAT16",
    "FLOAT32",
    "FLOAT64",
    "FP16",
    "FP32",
    "FP64",
    "L2",
    "LEVELS",
    "LINF",
    "MAGNITUDES_SHAPE",
    "MAX_ELEMENTS",
    "MINMAX",
    "ONEBIT",
    "OWNER_RANK",
    "QUANTISERS",
    "SEGMENT",
    "SIGN",
    "STOCHASTIC",
    "VOTE",
    "Again",
    "Bytes",
    "Magnitudes",
    "Pending",
    "SegmentTable",
    "body",
    "crc32c",
    "decode",
    "decode_add",
    "encode",
    "nonzero",
    "reduce",
    "together",
    "use",
    "wire_bytes",
    "wire_bytes_table",
]


def encode(
    codec: int,
    table: SegmentTable,
    payload: Bytes,
    flags: Bytes,
    *,
    stochastic: bool,
    seed: int,
    step: int,
    rank: int,
    scale: float,
    decay: float,
    magnitudes: Magnitudes | None = None,
) -> None:
    """Encode contributions; see `reference.encode`."""
    bodies.active().encode(
        codec,
        table,
        payload,
        flags,
        stochastic=stochastic,
        seed=seed,
        step=step,
        rank=rank,
        scale=scale,
        decay=decay,
        magnitudes=magnitudes,
    )


def decode(
    codec: int,
    table: SegmentTable,
    payload: Bytes,
    flags: Bytes,
    *,
    divisor: float,
    scale: float,
    magnitudes: Magnitudes | None = None,
) -> None:
    """Decode into the outputs; see `reference.decode`."""
    bodies.active().decode(codec, table, payload, flags, divisor=divisor, scale=scale, magnitudes=magnitudes)


def decode_add(
    codec: int,
    table: SegmentTable,
    payload: Bytes,
    *,
    scale: float,
    magnitudes: Magnitudes | None = None,
) -> None:
    """Decode and add to the outputs; see `reference.decode_add`."""
    bodies.active().decode_add(codec, table, payload, scale=scale, magnitudes=magnitudes)


def reduce(
    codec: int,
    table: SegmentTable,
    payloads: Sequence[Bytes],
    out: Bytes,
    flags: Bytes,
    *,
    stochastic: bool,
    seed: int,
    step: int,
    divisor: float,
    decay: float,
    rank: int = OWNER_RANK,
    magnitudes: Magnitudes | None = None,
) -> None:
    """Encode the mean of payloads; see `reference.reduce`."""
    bodies.active().reduce(
        codec,
        table,
        payloads,
        out,
        flags,
        stochastic=stochastic,
        seed=seed,
        step=step,
        divisor=divisor,
        decay=decay,
        rank=rank,
        magnitudes=magnitudes,
    )


def together(*arguments: Any, again: Again | None = None) -> AbstractContextManager[Pending]:
    """encode, decode, decode_add and reduce of a device become one call, which is started at the end of the block.

    ``arguments``: tables with their addresses, and messages; the device is that of the first that lies on one. The
    results are there once what the block is given is finished. On the host each kernel runs at once. Codecs that are
    told ``on=`` the block's ``kernels`` need not look again where their arguments lie. ``again``: of the same block, if
    it comes in every step; then tables are checked once.
    """
    device = None if again is None else again.device
    if device is None:
        device = bodies.device_of(arguments)
        if device is None:
            return nullcontext(DONE)
        if again is not None:
            again.device = device
    found: AbstractContextManager[Pending] = device.together(device, again)
    return found


def nonzero(table: SegmentTable, out: Bytes) -> None:
    """Which gradients have a nonzero element; see `reference.nonzero`."""
    bodies.active().nonzero(table, out)


def crc32c(data: Bytes, value: int = 0) -> int:
    """The checksum of bytes that follow those with the checksum ``value``; see `reference_checksum.crc32c`."""
    checksum: int = bodies.active().crc32c(data, value)
    return checksum
