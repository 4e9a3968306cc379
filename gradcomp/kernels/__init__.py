"""One function per kernel: `reference` defines and documents them, the compiled body is used where it was built.

The functions take a segment table (see `segments`) and serve a whole group per call.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from gradcomp.kernels import dispatch, reference, reference_bits, reference_checksum
from gradcomp.kernels.devices import Device
from gradcomp.kernels.dispatch import body, use
from gradcomp.kernels.replayed_calls import DONE, Pending, Routine
from gradcomp.kernels.segments import (
    BF16,
    BFLOAT16,
    CODEBOOK_L2,
    CODEBOOK_LINF,
    CODEBOOKS,
    DTYPES,
    E2M1,
    E4M3,
    E5M2,
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
    MINMAX_LEAST_BYTES,
    MINMAX_LEAST_ERROR,
    MINMAX_SHIFT,
    NVFP4,
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
    "E2M1",
    "E4M3",
    "E5M2",
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
    "MINMAX_LEAST_BYTES",
    "MINMAX_LEAST_ERROR",
    "MINMAX_SHIFT",
    "NVFP4",
    "ONEBIT",
    "OWNER_RANK",
    "QUANTISERS",
    "SEGMENT",
    "SIGN",
    "STOCHASTIC",
    "VOTE",
    "Bytes",
    "Magnitudes",
    "Pending",
    "Routine",
    "SegmentTable",
    "body",
    "compact",
    "crc32c",
    "decode",
    "decode_add",
    "encode",
    "nonzero",
    "reduce",
    "restore",
    "sample",
    "together",
    "use",
    "wire_bytes",
    "wire_bytes_table",
]


encode = dispatch.kernel(reference.encode)
decode = dispatch.kernel(reference.decode)
decode_add = dispatch.kernel(reference.decode_add)
reduce = dispatch.kernel(reference.reduce)
nonzero = dispatch.kernel(reference.nonzero)
crc32c = dispatch.kernel(reference_checksum.crc32c)
sample = dispatch.kernel(reference_checksum.sample)
compact = dispatch.kernel(reference_bits.compact)
restore = dispatch.kernel(reference_bits.restore)


def together(device: Device, routine: Routine | None = None) -> AbstractContextManager[Pending]:
    """Collects the kernels that the block calls into one call on the device, started when the block ends.

    The block is given that call; results are in their arrays once it is finished. On the host each kernel runs at
    once.

    Args:
        device: where the kernels run.
        routine: the block's own, if it is entered in every step; the device then checks the tables only once.
    """
    if device.kernels is None:
        return nullcontext(DONE)
    found: AbstractContextManager[Pending] = device.kernels.together(routine)
    return found
