"""Groups of segments with their memory, and what a backend of the kernels makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gradcomp.kernels import segments
from gradcomp.kernels.devices import HOST
from gradcomp.kernels.segments import Draw

CODECS = {
    "minmax": segments.MINMAX,
    "l2": segments.L2,
    "linf": segments.LINF,
    "fp32": segments.FP32,
    "fp16": segments.FP16,
    "bf16": segments.BF16,
    "fp64": segments.FP64,
    "sign": segments.SIGN,
    "vote": segments.VOTE,
    "onebit": segments.ONEBIT,
    "codebook-l2": segments.CODEBOOK_L2,
    "codebook-linf": segments.CODEBOOK_LINF,
    "codebook-minmax": segments.CODEBOOK_MINMAX,
    "e4m3": segments.E4M3,
    "e5m2": segments.E5M2,
    "e2m1": segments.E2M1,
    "nvfp4": segments.NVFP4,
    "least-bytes": segments.MINMAX_LEAST_BYTES,
    "least-error": segments.MINMAX_LEAST_ERROR,
    "minmax-shift": segments.MINMAX_SHIFT,
}


AWKWARD = [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, -np.nan, 1e-45, -1e-45, 1e-38]
AWKWARD += [3e38, -3e38, 65504.0, 65520.0, 3.39e38]


def magnitudes_of(codec: int) -> Any:
    """Magnitudes for a codebook, uneven and with repeated ones at the end; None for the other codecs."""
    if codec not in segments.CODEBOOKS:
        return None
    magnitudes = np.zeros(segments.MAGNITUDES_SHAPE, np.float32)
    for bits in levels_of(codec):
        count = 1 << (bits - (codec in segments.SIGNED_CODEBOOKS))
        distinct = count - count // 4
        magnitudes[bits, :distinct] = (np.arange(distinct) / (distinct - 1)) ** 2
        magnitudes[bits, distinct:count] = 1
    return magnitudes


def dtypes_of(codec: int) -> tuple[int, ...]:
    """The dtypes that go with a codec."""
    if codec == segments.FP64:
        return (segments.FLOAT64,)
    return (segments.FLOAT32, segments.FLOAT16, segments.BFLOAT16)


def levels_of(codec: int) -> Sequence[int]:
    """The levels of a codec; casts have none."""
    return segments.LEVELS.get(codec, (0,))


def nearest_level(codec: int, bits: int) -> int:
    """The number of bits that a codec takes and that is nearest to the given one."""
    levels = levels_of(codec)
    return min(max(bits, min(levels)), max(levels))


@dataclass
class Segment:
    """One row of a table, by value."""

    gradient: Any  # array in the segment's dtype, or None with `length` given
    residual: Any = None
    bits: int = 4
    bucket_size: int = 512
    start: int = 0
    layer: int = 0
    next_residual: bool = False
    dtype: int = segments.FLOAT32
    length: int = -1

    def __post_init__(self) -> None:
        if self.gradient is not None:
            self.length = len(self.gradient)


@dataclass
class Result:
    """What a kernel wrote. The next residual of a flagged segment is unspecified, and left out."""

    payload: bytes
    flags: list[int]
    arrays: list[bytes | None]


@dataclass
class Group:
    """Segments side by side in one payload, with gaps, between guard bytes that nobody may touch."""

    codec: int
    rows: Sequence[Segment]
    gap: int = 3
    memory: Any = None  # of next residuals and outputs; GuardedArray
    table: Any = field(init=False)
    size: int = field(init=False)
    magnitudes: Any = field(init=False)

    def __post_init__(self) -> None:
        self.magnitudes = magnitudes_of(self.codec)
        self.table = np.zeros(len(self.rows), segments.SEGMENT)
        for i, row in enumerate(self.rows):
            for name in ("bucket_size", "start", "layer", "dtype", "length"):
                self.table[i][name] = getattr(row, name)
            self.table[i]["level"] = row.bits
            if row.length > 0 and row.gradient is not None:
                self.table[i]["gradient"] = row.gradient.ctypes.data
            if row.length > 0 and row.residual is not None:
                self.table[i]["residual"] = row.residual.ctypes.data
        sizes = segments.wire_bytes_table(self.codec, self.table)
        self.table["payload"] = self.gap + np.cumsum(sizes + self.gap) - (sizes + self.gap)
        self.size = int(self.gap + (sizes + self.gap).sum())

    def encode(self, backend: Any, **options: Any) -> Result:
        """Encode with a backend of the kernels: `reference`, `native` or those of a device."""
        options = {"scale": 1.0, "decay": 1.0} | _with_draw(options, rank=3)
        table, next_residuals = self._with_arrays(
            "next_residual", [np.dtype(np.float32) if row.next_residual else None for row in self.rows]
        )
        payload = np.full(self.size, 0xA5, np.uint8)
        flags = np.zeros(len(table), np.uint8)
        backend.encode(self.codec, table, payload, flags, **options, magnitudes=self.magnitudes)
        return _result(payload, flags, next_residuals)

    def reduce(self, backend: Any, payloads: Sequence[bytes], **options: Any) -> Result:
        """Encode the mean of payloads."""
        options = _with_draw(options, rank=segments.OWNER_RANK)
        options = {"divisor": float(len(payloads)), "decay": 1.0} | options
        table, next_residuals = self._with_arrays(
            "next_residual", [np.dtype(np.float32) if row.next_residual else None for row in self.rows]
        )
        out = np.full(self.size, 0xA5, np.uint8)
        flags = np.zeros(len(table), np.uint8)
        sources = [np.frombuffer(payload, np.uint8) for payload in payloads]
        backend.reduce(self.codec, table, sources, out, flags, **options, magnitudes=self.magnitudes)
        return _result(out, flags, next_residuals)

    def decode(
        self, backend: Any, payload: bytes, flags: Sequence[int] | None = None, **options: Any
    ) -> Result:
        """Decode to fresh outputs."""
        options = {"divisor": 1.0, "scale": 1.0} | options
        table, outputs = self._with_arrays("output", [segments.DTYPES[row.dtype] for row in self.rows])
        flag_array = np.array([0] * len(table) if flags is None else flags, np.uint8)
        source = np.frombuffer(payload, np.uint8)
        backend.decode(self.codec, table, source, flag_array, **options, magnitudes=self.magnitudes)
        return Result(payload, flag_array.tolist(), [_canonical(output) for output in outputs])

    def decode_add(self, backend: Any, payload: bytes, *, scale: float = 1.0) -> Result:
        """Decode, and add to ones."""
        table, outputs = self._with_arrays("output", [np.dtype(np.float32)] * len(self.rows))
        table["dtype"] = segments.FLOAT32
        for output in outputs:
            output[:] = 1
        source = np.frombuffer(payload, np.uint8)
        backend.decode_add(self.codec, table, source, scale=scale, magnitudes=self.magnitudes)
        return Result(payload, [], [_canonical(output) for output in outputs])

    def values(self, payload: bytes) -> list[Any]:
        """Decoded values, one array per segment."""
        decoded = self.decode(HOST.kernels, payload)
        return [
            np.frombuffer(data or b"", segments.DTYPES[row.dtype])
            for data, row in zip(decoded.arrays, self.rows, strict=True)
        ]

    def _with_arrays(self, column: str, dtypes: Sequence[Any]) -> tuple[Any, list[Any]]:
        """The table with an array of each dtype, one per row, in a column."""
        table = self.table.copy()
        arrays: list[Any] = []
        for i, dtype in enumerate(dtypes):
            arrays.append(
                None if dtype is None else (self.memory or GuardedArray)(self.rows[i].length, dtype).array
            )
            if dtype is not None and self.rows[i].length > 0:
                table[i][column] = arrays[i].ctypes.data
        return table, arrays


class GuardedArray:
    """An array of NaN at an odd alignment, with guard elements around it."""

    def __init__(self, length: int, dtype: Any) -> None:
        self.memory = np.full(length + 2, np.nan, dtype)
        self.array = self.memory[1 : length + 1]


class AlignedArray:
    """An array on a boundary of sixteen bytes, with guard elements around it."""

    def __init__(self, length: int, dtype: Any) -> None:
        self.memory = np.full(length + 16, np.nan, dtype)
        begin = 1 + -(self.memory.ctypes.data + self.memory.itemsize) % 16 // self.memory.itemsize
        self.array = self.memory[begin : begin + length]
        assert self.array.ctypes.data % 16 == 0


def _with_draw(options: dict[str, Any], rank: int) -> dict[str, Any]:
    """``stochastic``, ``seed``, ``step`` and ``rank``, all of which may be left out, as a draw or None."""
    words = {"seed": 1, "step": 2, "rank": rank}
    draw = Draw(**{name: options.get(name, word) for name, word in words.items()})
    rest = {name: each for name, each in options.items() if name not in words and name != "stochastic"}
    return {"draw": draw if options.get("stochastic") else None} | rest


def _result(payload: Any, flags: Any, next_residuals: list[Any]) -> Result:
    for next_residual in next_residuals:
        if next_residual is not None:
            assert np.isnan(next_residual.base[[0, -1]]).all(), "written beyond the next residual"
    kept = [
        None if flag or next_residual is None else next_residual.tobytes()
        for flag, next_residual in zip(flags, next_residuals, strict=True)
    ]
    return Result(payload.tobytes(), flags.tolist(), kept)


def _canonical(output: Any) -> bytes:
    """The bytes of an output; one NaN is as good as another."""
    assert np.isnan(output.base[[0, -1]].astype(np.float64)).all(), "written beyond the output"
    copy = output.copy()
    copy[np.isnan(copy)] = np.nan
    return copy.tobytes()
