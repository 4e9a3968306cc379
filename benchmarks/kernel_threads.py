"""Speed of encode, decode and reduce on several threads, as a ratio to one thread, and what 8 cores could do.

    python benchmarks/kernel_threads.py [--threads 1,2] [--megabytes 64 4] [--rounds 15] [--bits 4] [--json PATH]

One layer of so many megabytes of float32 is encoded and decoded with min-max scales, in buckets of 512. Figures are
medians of wall time. All numbers of threads take turns within a round, so run it on an otherwise idle machine. The
bar: two threads encode and decode 64 MB at least 1.7 times as fast as one. It needs two cores; with fewer it is not
judged, and the exit status is 1, as it is for a bar that is missed.

The roofline of 8 cores is the smaller of 8 times the rate of one thread and the memory's bandwidth over the bytes that
an element needs: what a kernel must read and write, each once. The bandwidth is the most that copies and reads reach on
one core and on all cores here. A machine with 8 cores may have more of it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from codec import BUCKET_SIZE, Workload, aligned, processor_name

from gradcomp.kernels import dispatch, segments

BAR, BARRED, BAR_MEGABYTES = 1.7, ("encode", "decode"), 64
CORES = 8  # of the roofline
MINMAX = segments.MINMAX


@dataclass(frozen=True)
class Row:
    """The rate of one operation by number of threads."""

    megabytes: int
    operation: str
    bytes_per_element: float
    gigabytes_per_second: dict[int, float]
    roofline: float

    @property
    def ratio(self) -> dict[int, float]:
        """The rate by number of threads over that of one thread."""
        one = self.gigabytes_per_second[1]
        return {threads: rate / one for threads, rate in self.gigabytes_per_second.items()}

    @property
    def barred(self) -> bool:
        return self.megabytes == BAR_MEGABYTES and self.operation in BARRED and 2 in self.gigabytes_per_second


def roofline(one_thread: float, bandwidth: float, bytes_per_element: float) -> float:
    """Returns the most GB/s of float32 that CORES cores can handle, and that the memory lets pass."""
    return min(CORES * one_thread, bandwidth * 4 / bytes_per_element)


def operations(work: Workload, bits: int) -> dict[str, tuple[float, Callable[[], None]]]:
    """Returns, by name, the bytes that an element needs at least and a call."""
    payload = segments.wire_bytes(MINMAX, BUCKET_SIZE, bits, BUCKET_SIZE) / BUCKET_SIZE

    def encode(*, stochastic: bool, residual: bool) -> Callable[[], None]:
        return lambda: work.encode(MINMAX, bits, stochastic=stochastic, residual=residual)

    return {
        "encode": (4 + payload, encode(stochastic=False, residual=False)),
        "encode, residual": (12 + payload, encode(stochastic=False, residual=True)),
        "encode, stochastic": (4 + payload, encode(stochastic=True, residual=False)),
        "decode": (4 + payload, lambda: work.decode(MINMAX, bits)),
        "decode-add": (8 + payload, lambda: work.decode_add(MINMAX, bits)),
        "reduce of 2": (3 * payload, lambda: work.reduce(MINMAX, bits)),
    }


def in_turn(calls: dict[int, Callable[[], None]], rounds: int) -> dict[int, float]:
    """Returns the median seconds of each call; the first round warms up."""
    seconds: dict[int, list[float]] = {key: [] for key in calls}
    for _ in range(rounds + 1):
        for key, call in calls.items():
            begin = time.perf_counter()
            call()
            seconds[key].append(time.perf_counter() - begin)
    return {key: statistics.median(times[1:]) for key, times in seconds.items()}


def by_threads(task: Callable[..., object], arguments: list[tuple[object, ...]]) -> Callable[[], None]:
    """Returns a call that runs a task once for each of the arguments, on a thread of its own."""

    def run() -> None:
        workers = [threading.Thread(target=task, args=each) for each in arguments]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()

    return run


def bandwidths(counts: list[int], megabytes: int, rounds: int) -> dict[str, dict[int, float]]:
    """Returns GB/s that passes, read and written bytes together, in copies and in reads, by number of threads."""
    size = megabytes << 20
    arrays = {n: [(aligned(size // 4 // n), aligned(size // 4 // n)) for _ in range(n)] for n in counts}
    copies = in_turn({n: by_threads(np.copyto, list(arrays[n])) for n in counts}, rounds)
    reads = in_turn({n: by_threads(np.max, [(a,) for a, _ in arrays[n]]) for n in counts}, rounds)
    return {
        "copies": {n: 2 * size / seconds / 1e9 for n, seconds in copies.items()},
        "reads": {n: size / seconds / 1e9 for n, seconds in reads.items()},
    }


def measure(megabytes: int, bits: int, counts: list[int], rounds: int, bandwidth: float) -> list[Row]:
    """Returns the rows of a layer of so many megabytes."""
    work = Workload((megabytes << 20) // 4)
    work.encode(MINMAX, bits, stochastic=False, residual=False, payload=1)
    rows = []
    for name, (needed, call) in operations(work, bits).items():

        def on(threads: int, call: Callable[[], None] = call) -> Callable[[], None]:
            def run() -> None:
                dispatch.set_threads(threads)
                call()

            return run

        seconds = in_turn({threads: on(threads) for threads in counts}, rounds)
        rates = {threads: 4 * work.length / each / 1e9 for threads, each in seconds.items()}
        most = roofline(rates[1], bandwidth, needed)
        rows.append(Row(megabytes, name, needed, rates, most))
    return rows


def table(rows: list[Row], counts: list[int]) -> str:
    """Returns the figures in Markdown."""
    head = ["MB", "operation", *(f"{n} thread{'s' * (n > 1)}, GB/s" for n in counts)]
    head += [*(f"{n} : 1" for n in counts if n > 1), "bytes an element", f"roofline of {CORES}, GB/s", "bar"]
    lines = ["| " + " | ".join(head) + " |", "|---:|---|" + "---:|" * (len(head) - 2)]
    for row in rows:
        cells = [str(row.megabytes), row.operation, *(f"{row.gigabytes_per_second[n]:.2f}" for n in counts)]
        cells += [f"{row.ratio[n]:.2f}" for n in counts if n > 1]
        verdict = "" if not row.barred else f"{BAR} " + ("met" if row.ratio[2] >= BAR else "missed")
        lines.append(
            "| " + " | ".join([*cells, f"{row.bytes_per_element:.2f}", f"{row.roofline:.1f}", verdict]) + " |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--threads", default="1,2", help="numbers of threads, the first is 1 (default: %(default)s)"
    )
    parser.add_argument("--megabytes", type=int, nargs="+", default=[BAR_MEGABYTES, 4], help="of float32")
    parser.add_argument("--bits", type=int, default=4, choices=range(1, 9), metavar="BITS")
    parser.add_argument("--rounds", type=int, default=15, help="runs per figure (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    counts = [int(text) for text in arguments.threads.split(",")]
    if counts[0] != 1:
        parser.error("--threads begins with 1, which the others are compared with")

    cores = len(os.sched_getaffinity(0))
    bandwidth = bandwidths(sorted({1, cores}), BAR_MEGABYTES, arguments.rounds)
    most = max(rate for rates in bandwidth.values() for rate in rates.values())
    with dispatch.use("native"):
        rows = [
            row
            for megabytes in arguments.megabytes
            for row in measure(megabytes, arguments.bits, counts, arguments.rounds, most)
        ]
    print(f"{processor_name()}, {cores} cores")
    for name, rates in bandwidth.items():
        print(f"{name}: " + ", ".join(f"{rate:.1f} GB/s on {n}" for n, rate in rates.items()))
    print()
    print(table(rows, counts))
    judged = [row for row in rows if row.barred and cores >= 2]
    missed = sum(row.ratio[2] < BAR for row in judged)
    print(f"\n{missed} of {len(judged)} bars missed" if judged else "\nthe bar was not judged")
    if arguments.json:
        machine = {"processor": processor_name(), "cores": cores, "system": platform.platform()}
        settings = {"bits": arguments.bits, "rounds": arguments.rounds, "bucket_size": BUCKET_SIZE}
        report = {
            "machine": machine, "settings": settings, "bandwidth_gigabytes_per_second": bandwidth,
            "rows": [asdict(row) | {"ratio": row.ratio} for row in rows],
        }  # fmt: skip
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if judged and not missed else 1


if __name__ == "__main__":
    sys.exit(main())
