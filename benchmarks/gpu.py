"""Speed of the kernels on a GPU, beside copies and sums of the same memory in the same run.

    python benchmarks/gpu.py [--megabytes 512] [--rounds 40] [--json PATH]

A figure is the median of many calls. "device ms" is the time between events around the launches of a call, on its
stream, behind a kernel that spins for a millisecond: what Python takes between two launches is no part of it. "wall ms"
is that of the whole call, without that kernel, with its copies to and from the host and its wait. Lists and payloads
lie on the device, payloads at the offsets that they have in messages. Inputs take turns, so that no cache answers.
"share" is the rate in bytes read and written, as a share of the yardstick's: a copy from device to device,
`c = a + b`, or torch.topk (there: how many times faster). PowerSGD's bytes are its floor, 16 for each element.

Every figure is printed and written as soon as it is there: a run that is cut off keeps what it has measured.
"predicted" is what was expected of an H100 (gpu_predictions.py), in the unit that stands there.

Results are compared with the host's kernels: all of them, or the first rows where the compiled module is missing.

Needs CuPy and a GPU; without, it says that nothing was measured and its exit status is 2. `--check` runs every row at
a small size with the tests' stand-in for a GPU, whose times mean nothing, and says only whether results are right.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gpu_machine
import gpu_predictions
import report
from gpu_machine import Machine
from gpu_work import Codes, LowRank, Selection, launches

from gradcomp.core.errors import ConfigError

#: Shares that are at least wanted, by what a row's name begins with.
BARS = {
    "encode": 0.8,
    "encode, stochastic": 0.7,
    "encode, residual": 0.75,
    "decode": 0.85,
    "top-k": 4.0,
    "DGC": 0.5,
}

#: By whether what torch.topk selects is in order.
YARDSTICKS = {True: "torch.topk", False: "torch.topk, sorted=False"}


@dataclass(frozen=True)
class Row:
    """One figure. `share`: of the yardstick's rate; `right`: whether the result is that of the host's kernels."""

    name: str
    dtype: str
    milliseconds: float
    wall_milliseconds: float
    gigabytes_per_second: float
    yardstick: str
    share: float
    bar: float | None
    right: bool

    @property
    def missed(self) -> bool:
        return not self.right or (self.bar is not None and self.share < self.bar)


def median_of(machine: Machine, function: Callable[[int], Any], rounds: int) -> tuple[float, float]:
    """Device and wall milliseconds; `function` gets the number of the round, the first two warm up."""
    found = [machine.timed(lambda number=number: function(number)) for number in range(rounds + 2)][2:]
    device, wall = zip(*found, strict=True)
    return statistics.median(device), statistics.median(wall)


class Bench:
    """The rows, against the yardsticks of the same run."""

    def __init__(self, machine: Machine, elements: int, rounds: int) -> None:
        self.machine, self.elements, self.rounds = machine, elements, rounds
        self.rates: dict[str, float] = {}  # bytes per millisecond

    def row(
        self,
        name: str,
        function: Callable[[int], Any],
        moved: int,
        yardstick: str,
        *,
        bar: float | None = None,
        right: bool = True,
        dtype: str = "float32",
    ) -> Row:
        device, wall = median_of(self.machine, function, self.rounds)
        rate = moved / device
        self.rates.setdefault(name, rate)
        return Row(name, dtype, device, wall, rate / 1e6, yardstick, rate / self.rates[yardstick], bar, right)

    def yardsticks(self) -> Iterator[Row]:
        work = Codes(self.machine, self.elements, "float32")
        for name, function, arrays in (("copy", work.copy, 2), ("c = a + b", work.add, 3)):
            moved = arrays * 4 * self.elements
            self.rates[name] = moved / median_of(self.machine, function, self.rounds)[0]
            yield self.row(name, function, moved, "copy")

    def codes(self) -> Iterator[Row]:
        for dtype in ("float32", "float16"):
            work = Codes(self.machine, self.elements, dtype)
            size, n = work.payload_bytes, self.elements
            for stochastic in (False, True):
                rounding = ", stochastic" if stochastic else ""
                for residual in (False, True):
                    kind = "encode, residual" if residual else "encode"
                    yield self.row(
                        f"{kind}{rounding}",
                        lambda i, s=stochastic, r=residual, w=work: w.encode(i, stochastic=s, residual=r),  # type: ignore[misc]
                        (work.itemsize + 8 * residual) * n + size,
                        "c = a + b" if residual else "copy",
                        bar=BARS["encode, stochastic" if stochastic and not residual else kind],
                        right=work.encoded_right(stochastic=stochastic, residual=residual),
                        dtype=dtype,
                    )
            yield self.row(
                "decode",
                work.decode,
                work.itemsize * n + size,
                "copy",
                bar=BARS["decode"],
                right=work.decoded_right(),
                dtype=dtype,
            )
        for ranks in (2, 4, 8):
            yield self.row(
                f"reduce of {ranks}",
                lambda i, ranks=ranks: work.reduce(i, ranks),  # type: ignore[misc]
                (ranks + 1) * size,
                "copy",
                right=work.reduced_right(ranks),
                dtype="codes",
            )

    def selections(self, elements: int) -> Iterator[Row]:
        work = Selection(self.machine, elements)
        beside = YARDSTICKS.items() if work.torch_tensor is not None else ()
        for in_order, name in beside:
            yield self.row(name, partial(work.torch_top, in_order=in_order), 8 * elements, "copy")
        right = work.top_right()
        for in_order, yardstick in beside or [(True, "copy")]:
            bar = None if in_order else BARS["top-k"]
            yield self.row("top-k of 1%", work.top, 8 * elements, yardstick, bar=bar, right=right)
        yield self.row(
            "DGC, sampled", work.sampled, 8 * elements, "copy", bar=BARS["DGC"], right=work.sampled_right()
        )

    def all_rows(self, *, small: bool) -> Iterator[Row]:
        """One after the other, each when it is measured."""
        yield from self.yardsticks()
        yield from self.codes()
        yield from self.selections(20_000 if small else 64 << 20)
        yield from self.low_rank(small=small)

    def low_rank(self, *, small: bool) -> Iterator[Row]:
        work = LowRank(self.machine, small=small)
        yield self.row(
            "PowerSGD of rank 4, GPT of 125 M", work.step, 16 * work.elements, "copy", right=work.right()
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--megabytes", type=int, default=512, help="of float32 gradients (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=40, help="calls per figure (default: %(default)s)")
    parser.add_argument("--device", type=int, default=0, help="number of the GPU (default: %(default)s)")
    parser.add_argument("--check", action="store_true", help="a small run on the stand-in, without times")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    if not arguments.check and arguments.megabytes < 256:
        parser.error("--megabytes: caches would answer for less than 256")

    try:
        machine = gpu_machine.stand_in() if arguments.check else gpu_machine.real(arguments.device)
    except ConfigError as error:
        print(f"nothing was measured: {error}", file=sys.stderr)
        return 2
    found = report.machine() | machine.about
    print(report.describe(found))
    print(", ".join(f"{name} {value}" for name, value in machine.about.items()) + "\n")

    elements = 6000 if arguments.check else (arguments.megabytes << 20) // 4
    bench = Bench(machine, elements, 1 if arguments.check else arguments.rounds)
    settings = {"elements": elements, "rounds": bench.rounds, "check": arguments.check}
    notes = Notes(arguments.json, {"machine": found, "settings": settings}, times=not arguments.check)
    rows = []
    for row in bench.all_rows(small=arguments.check):
        rows.append(row)
        notes.add(row)
    counts = {layers: launches(machine, layers) for layers in (10, 100, 1000)}
    notes.end(counts)
    show(rows, counts, times=not arguments.check)
    wrong, missed = sum(not row.right for row in rows), sum(row.missed for row in rows)
    wrong += len(set(counts.values())) > 1
    if arguments.check:
        return 1 if wrong else 0
    failed = [row.name for row in rows if row.missed]
    print("\n" + (f"wrong, or short of its bar: {', '.join(failed)}" if failed else "all bars are met"))
    return 1 if wrong or missed else 0


class Notes:
    """What has been measured so far: a line of output for each row, and the JSON as of now, whole or not at all.

    ``times``: of the stand-in they are nobody's, and are left out.
    """

    def __init__(self, path: Path | None, about: dict[str, Any], *, times: bool) -> None:
        self._path, self._times = path, times
        self._found = {**about, "complete": False, "rows": [], "launches": []}

    def add(self, row: Row) -> None:
        written = asdict(row)
        if not self._times:
            written = {"name": row.name, "dtype": row.dtype, "right": row.right}
        self._found["rows"].append(written)
        figures = f": {row.milliseconds:.3f} ms, {row.share:.2f} of {row.yardstick}" if self._times else ""
        print(f"{row.name}, {row.dtype}{figures}{'' if row.right else ', WRONG'}", flush=True)
        report.write_json(self._path, self._found)

    def end(self, counts: dict[int, int]) -> None:
        launched = [{"layers": layers, "launches": count} for layers, count in counts.items()]
        self._found |= {"complete": True, "launches": launched}
        print()
        report.write_json(self._path, self._found)


def show(rows: list[Row], counts: dict[int, int], *, times: bool) -> None:
    """The tables."""
    if times:
        headers = ("call", "dtype", "device ms", "wall ms", "GB/s", "share", "of", "bar", "predicted", "")
        lines = [
            (
                *(row.name, row.dtype, f"{row.milliseconds:.3f}", f"{row.wall_milliseconds:.3f}"),
                *(f"{row.gigabytes_per_second:.0f}", f"{row.share:.2f}", row.yardstick, row.bar),
                gpu_predictions.of_row(row.name, row.dtype),
                "WRONG" if not row.right else "MISSED" if row.missed else "",
            )
            for row in rows
        ]
    else:
        headers = ("call", "dtype", "result")
        lines = [(row.name, row.dtype, "right" if row.right else "WRONG") for row in rows]
    print(report.table(headers, lines) + "\n")
    print(report.table(("layers", "launches per step"), list(counts.items())))


if __name__ == "__main__":
    sys.exit(main())
