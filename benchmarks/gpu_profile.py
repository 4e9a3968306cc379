"""What Nsight Compute counts in the kernels of benchmarks/gpu.py: one call of each, when all modules are loaded.

    python benchmarks/gpu_profile.py [--megabytes 256] [--json PATH]

Columns, for every launch: microseconds, and in percent of what the device can at most: bytes of its memory, its
busiest unit, instructions issued, warps that are resident. A kernel of which memory is busy is done; one that issues
in nearly every cycle needs fewer instructions; one of which neither is true waits. Clocks are left as they are.

Exit status 1 if the profiler fails, with its words; 2 without a GPU.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import gpu_machine
import report
from gpu_machine import Machine
from gpu_work import Codes, LowRank, Selection

from gradcomp.core.errors import ConfigError

#: By column.
COUNTERS = {
    "us": "gpu__time_duration.sum",
    "memory %": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "busiest unit %": "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "issued %": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "warps %": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "registers": "launch__registers_per_thread",
}
#: By the unit that the profiler names: factors to microseconds.
_TIMES = {"ns": 1e-3, "nsecond": 1e-3, "us": 1.0, "usecond": 1.0, "ms": 1e3, "msecond": 1e3}
_KERNEL = "Kernel Name"


def command(log: Path, megabytes: int) -> list[str]:
    """The profiler over this script. It begins where the script says so."""
    return [
        "ncu",
        *("--profile-from-start", "off", "--clock-control", "none"),
        *("--csv", "--page", "raw", "--metrics", ",".join(COUNTERS.values()), "--log-file", str(log)),
        *(sys.executable, __file__, "--calls", "--megabytes", str(megabytes)),
    ]


def calls(machine: Machine, elements: int, *, small: bool = False) -> Iterator[Callable[[int], Any]]:
    """Those of the rows of benchmarks/gpu.py."""
    for dtype in ("float32", "float16"):
        work = Codes(machine, elements, dtype)
        for stochastic in (False, True):
            for residual in (False, True):
                yield lambda i, w=work, s=stochastic, r=residual: w.encode(i, stochastic=s, residual=r)  # type: ignore[misc]
        yield work.decode
    yield lambda i, w=work: w.reduce(i, 4)  # type: ignore[misc]
    selection = Selection(machine, 20_000 if small else 64 << 20)
    yield selection.top
    yield selection.sampled
    yield LowRank(machine, small=small).step


def profiled(
    machine: Machine, elements: int, begin: Callable[[], Any], end: Callable[[], Any], *, small: bool
) -> int:
    """Each call twice, of which the second is profiled; how many."""
    count = 0
    for call in calls(machine, elements, small=small):
        call(0)
        machine.driver.synchronize()
        begin()
        call(1)
        machine.driver.synchronize()
        end()
        count += 1
    return count


def parsed(text: str) -> list[dict[str, Any]]:
    """A row for each launch, in order, of what the profiler wrote; what it says of itself is passed over."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    if len(lines) < 2:
        return []
    header, units, *launches = csv.reader(lines)
    rows = []
    for cells in launches:
        found = dict(zip(header, cells, strict=True))
        row: dict[str, Any] = {"kernel": found[_KERNEL].partition("(")[0]}
        for column, name in COUNTERS.items():
            row[column] = _number(found.get(name, ""))
            if column == "us" and row[column] is not None:
                row[column] *= _TIMES[units[header.index(name)]]
        rows.append(row)
    return rows


def _number(cell: str) -> float | None:
    try:
        return float(cell.replace(",", ""))
    except ValueError:  # a counter that this device does not have
        return None


def show(rows: Sequence[dict[str, Any]]) -> None:
    lines = [
        (row["kernel"], *(None if row[column] is None else f"{row[column]:.1f}" for column in COUNTERS))
        for row in rows
    ]
    print(report.table(("kernel", *COUNTERS), lines))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--megabytes", type=int, default=256, help="of float32 gradients (default: %(default)s)"
    )
    parser.add_argument("--calls", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    if options.calls:
        try:
            machine = gpu_machine.real(0)
        except ConfigError as error:
            print(f"nothing was measured: {error}", file=sys.stderr)
            return 2
        from cupy.cuda import runtime

        elements = (options.megabytes << 20) // 4
        profiled(machine, elements, runtime.profilerStart, runtime.profilerStop, small=False)
        return 0
    with tempfile.TemporaryDirectory(prefix="gpu-profile-") as folder:
        log = Path(folder) / "counters.csv"
        try:
            done = subprocess.run(command(log, options.megabytes), check=False)
        except OSError as error:
            print(f"the profiler does not start: {error}")
            return 1
        text = log.read_text(errors="replace") if log.exists() else ""
    rows = parsed(text)
    report.write_json(options.json, {"machine": report.machine(), "rows": rows})
    if done.returncode or not rows:
        print(text[-3000:] or f"exit status {done.returncode}")
        return 2 if done.returncode == 2 and not text else 1
    show(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
