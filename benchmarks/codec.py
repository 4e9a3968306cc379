"""Speed of the codecs on one thread, as a ratio to moving the same float32 data.

    python benchmarks/codec.py [--megabytes 64] [--rounds 9] [--json PATH]

Each figure is time(baseline) / time(kernel) over the same float32 bytes: medians of runs that alternate between the
baseline and the kernel in one process. Time is the thread's processor time, which waiting for memory is part of
and other processes' turns are not. The baseline is `np.copyto` of warmed arrays; for rows with a residual, which
read a gradient and a residual and write the new residual beside the payload, it is `np.add(a, b, out=c)`.

The bars apply to AVX-512 at 4 and 8 bits; a figure below its bar is marked and the exit status is 1.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gradcomp import _native
from gradcomp.kernels import dispatch, segments
from gradcomp.kernels.devices import HOST
from gradcomp.kernels.segments import Draw

Floats = npt.NDArray[np.float32]

CODECS = {
    "minmax": segments.MINMAX,
    "l2": segments.L2,
    "linf": segments.LINF,
    "sign": segments.SIGN,
    "vote": segments.VOTE,
    "onebit": segments.ONEBIT,
    "codebook-l2": segments.CODEBOOK_L2,
    "codebook-linf": segments.CODEBOOK_LINF,
    "e4m3": segments.E4M3,
    "e5m2": segments.E5M2,
    "e2m1": segments.E2M1,
    "nvfp4": segments.NVFP4,
    "least-bytes": segments.MINMAX_LEAST_BYTES,
    "least-error": segments.MINMAX_LEAST_ERROR,
    "minmax-shift": segments.MINMAX_SHIFT,
}
BUCKET_SIZE = 512
BLOCKS = {segments.E4M3: 32, segments.E5M2: 32, segments.E2M1: 32, segments.NVFP4: 16}

# What the codebooks are measured with: NUQSGD's powers of two.
MAGNITUDES: Floats = np.zeros(segments.MAGNITUDES_SHAPE, np.float32)
for _bits in range(2, 9):
    _count = 1 << (_bits - 1)
    MAGNITUDES[_bits, 1:_count] = 2.0 ** np.arange(2.0 - _count, 1.0)


@dataclass(frozen=True)
class Row:
    """One figure."""

    isa: str
    codec: str
    bits: int
    operation: str
    gigabytes_per_second: float
    ratio: float
    bar: float | None

    @property
    def missed(self) -> bool:
        return self.bar is not None and self.ratio < self.bar


BARRED = ("minmax", "l2", "linf")
# For AVX-512 at 4 and 8 bits of these. Stochastic rounding without a residual is reported without a bar.
BARS = {"encode": 1.3, "decode": 1.5, "encode, residual": 0.75, "encode, residual, stochastic": 0.6}


def magnitudes_of(codec: int) -> Floats | None:
    """What the codec needs of them."""
    return MAGNITUDES if codec in segments.CODEBOOKS else None


def aligned(length: int, dtype: Any = np.float32) -> Any:
    """An array that begins a cache line, with its pages mapped."""
    size = length * np.dtype(dtype).itemsize
    memory = np.zeros(size + 64, np.uint8)
    offset = -memory.ctypes.data % 64
    return memory[offset : offset + size].view(dtype)


class Workload:
    """The arrays of all operations, and the operations on them."""

    def __init__(self, length: int) -> None:
        rng = np.random.default_rng(0)
        self.length = length
        self.gradient: Floats = aligned(length)
        self.gradient[:] = rng.standard_normal(length, np.float32)
        self.residual: Floats = aligned(length)
        self.residual[:] = 0.1 * rng.standard_normal(length, np.float32)
        self.next_residual: Floats = aligned(length)
        self.output: Floats = aligned(length)
        size = segments.wire_bytes(segments.MINMAX, length, 8, min(BLOCKS.values()))
        self.payloads = [aligned(size, np.uint8) for _ in range(2)]
        self.mean = aligned(size, np.uint8)
        self.flags = np.zeros(1, np.uint8)

    def table(self, codec: int, bits: int, **addresses: Any) -> segments.SegmentTable:
        table = np.zeros(1, segments.SEGMENT)
        table["length"], table["level"] = self.length, bits
        table["bucket_size"] = BLOCKS.get(codec, BUCKET_SIZE)
        for column, array in addresses.items():
            table[column] = array.ctypes.data
        return table

    def copy(self) -> None:
        np.copyto(self.output, self.gradient)

    def add(self) -> None:
        np.add(self.gradient, self.residual, out=self.next_residual)

    def encode(self, codec: int, bits: int, *, stochastic: bool, residual: bool, payload: int = 0) -> None:
        feedback = {"residual": self.residual, "next_residual": self.next_residual} if residual else {}
        HOST.kernels.encode(
            codec,
            self.table(codec, bits, gradient=self.gradient, **feedback),
            self.payloads[payload],
            self.flags,
            draw=Draw(1, 1, payload) if stochastic else None,
            scale=1.0,
            decay=1.0,
            magnitudes=magnitudes_of(codec),
        )

    def decode(self, codec: int, bits: int) -> None:
        table = self.table(codec, bits, output=self.output)
        HOST.kernels.decode(
            codec,
            table,
            self.payloads[0],
            self.flags,
            divisor=1.0,
            scale=1.0,
            magnitudes=magnitudes_of(codec),
        )

    def decode_add(self, codec: int, bits: int) -> None:
        HOST.kernels.decode_add(
            codec,
            self.table(codec, bits, output=self.output),
            self.payloads[0],
            scale=1e-3,
            magnitudes=magnitudes_of(codec),
        )

    def reduce(self, codec: int, bits: int) -> None:
        HOST.kernels.reduce(
            codec,
            self.table(codec, bits),
            self.payloads,
            self.mean,
            self.flags,
            draw=None,
            divisor=2.0,
            decay=1.0,
            magnitudes=magnitudes_of(codec),
        )


def alternate(baseline: Callable[[], None], kernel: Callable[[], None], rounds: int) -> tuple[float, float]:
    """Median processor seconds of each, run in turn; the first round warms up."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds + 1):
        for function, times in zip((baseline, kernel), seconds, strict=True):
            begin = time.thread_time()
            function()
            times.append(time.thread_time() - begin)
    return statistics.median(seconds[0][1:]), statistics.median(seconds[1][1:])


def measure(work: Workload, isa: str, name: str, bits: int, rounds: int) -> Iterator[Row]:
    """All figures of one codec at one level."""
    codec = CODECS[name]
    float_bytes = 4 * work.length

    def row(operation: str, baseline: Callable[[], None], kernel: Callable[[], None]) -> Row:
        before, after = alternate(baseline, kernel, rounds)
        bar = BARS.get(operation) if isa == "avx512" and name in BARRED and bits in (4, 8) else None
        return Row(isa, name, bits, operation, float_bytes / after / 1e9, before / after, bar)

    for stochastic in (False, True) if codec in segments.STOCHASTIC else (False,):
        suffix = ", stochastic" if stochastic else ""
        for residual in (False, True):
            yield row(
                "encode" + (", residual" if residual else "") + suffix,
                work.add if residual else work.copy,
                lambda s=stochastic, r=residual: work.encode(codec, bits, stochastic=s, residual=r),  # type: ignore[misc]
            )
    for payload in range(2):
        work.encode(codec, bits, stochastic=False, residual=False, payload=payload)
    yield row("decode", work.copy, lambda: work.decode(codec, bits))
    yield row("decode-add", work.copy, lambda: work.decode_add(codec, bits))
    yield row("reduce of 2", work.copy, lambda: work.reduce(codec, bits))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=64, help="of float32 data (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=9, help="runs per figure (default: %(default)s)")
    parser.add_argument("--codecs", nargs="+", choices=CODECS, default=["minmax", "l2"], metavar="CODEC")
    parser.add_argument("--bits", nargs="+", type=int, default=range(1, 9), metavar="BITS")
    parser.add_argument("--isas", nargs="+", default=_native.available_isas(), metavar="ISA")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()

    work = Workload((arguments.megabytes << 20) // 4)
    rows: list[Row] = []
    with dispatch.use("native"):
        for isa in arguments.isas:
            _native.set_isa(isa)
            for name in arguments.codecs:
                for bits in arguments.bits:
                    if bits not in segments.LEVELS[CODECS[name]]:
                        continue
                    print(f"\n{isa} {name} {bits} bits")
                    for row in measure(work, isa, name, bits, arguments.rounds):
                        bar = (
                            ""
                            if row.bar is None
                            else f"  bar {row.bar:.2f}" + ("  MISSED" if row.missed else "")
                        )
                        print(
                            f"  {row.operation:30} {row.gigabytes_per_second:6.1f} GB/s  x {row.ratio:5.2f}{bar}"
                        )
                        rows.append(row)

    missed = sum(row.missed for row in rows)
    print(f"\n{missed} of {sum(row.bar is not None for row in rows)} bars missed")
    if arguments.json:
        machine = {"processor": processor_name(), "system": platform.platform(), "numpy": np.__version__}
        settings = {"megabytes": arguments.megabytes, "rounds": arguments.rounds, "bucket_size": BUCKET_SIZE}
        report = {"machine": machine, "settings": settings, "rows": [asdict(row) for row in rows]}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if missed else 0


def processor_name() -> str:
    """What the system calls its processor."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


if __name__ == "__main__":
    sys.exit(main())
