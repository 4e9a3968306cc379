"""gradcomp's named allreduce of PyTorch tensors beside torch.distributed's own over Gloo: ranks of one host.

    python benchmarks/collectives.py [--world 2] [--rounds 30] [--json PATH]

A row is a float32 allreduce of so many bytes on the CPU. `gloo` is `torch.distributed.all_reduce`, `gradcomp` is
`allreduce_` with a name, both in place and blocking; `copied` is `allreduce`, which returns a new tensor. They
alternate in one run: gloo, gradcomp, copied, gloo, ... A time is that of the slower rank. Figures are medians in
milliseconds; `fast` ones are first deciles, which say more on a machine that is not idle.

The bars, for medians of `gradcomp`: 4 KB at most 0.5 ms more than `gloo`, 64 MB at most 1.05 x. A figure that misses
its bar is marked and the exit status is 1.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import report

SIZES = (4 << 10, 64 << 10, 1 << 20, 64 << 20)
MOST_EXTRA_MS, EXTRA_BYTES = 0.5, 4 << 10
MOST_RATIO, RATIO_BYTES = 1.05, 64 << 20


@dataclass(frozen=True)
class Row:
    """One size."""

    world: int
    nbytes: int
    gloo_ms: float
    gradcomp_ms: float
    copied_ms: float
    gloo_fast_ms: float
    gradcomp_fast_ms: float

    @property
    def bar(self) -> str:
        if self.nbytes not in (EXTRA_BYTES, RATIO_BYTES):
            return ""
        return "missed" if self.missed else "met"

    @property
    def missed(self) -> bool:
        if self.nbytes == EXTRA_BYTES:
            return self.gradcomp_ms > self.gloo_ms + MOST_EXTRA_MS
        return self.nbytes == RATIO_BYTES and self.gradcomp_ms > MOST_RATIO * self.gloo_ms


def measure(rounds: int) -> list[dict[str, Any]]:
    """On a rank: milliseconds of every call, by size and way."""
    import torch
    import torch.distributed as dist

    import gradcomp.torch as gc

    dist.init_process_group("gloo")
    gc.init(log_level="warning")
    results = []
    for nbytes in SIZES:
        tensor = torch.ones(nbytes // 4)
        ways: dict[str, Callable[[], Any]] = {
            "gloo": lambda tensor=tensor: dist.all_reduce(tensor),
            "gradcomp": lambda tensor=tensor: gc.allreduce_(tensor, op=gc.Sum, name="bench"),
            "copied": lambda tensor=tensor: gc.allreduce(tensor, op=gc.Sum, name="bench"),
        }
        times: dict[str, list[float]] = {name: [] for name in ways}
        count = rounds if nbytes >= 1 << 20 else 10 * rounds
        for number in range(count + 3):
            for name, way in ways.items():
                tensor.fill_(1.0)
                dist.barrier()
                began = time.perf_counter()
                way()
                if number >= 3:  # the first ones connect
                    times[name].append(1e3 * (time.perf_counter() - began))
        results.append({"nbytes": nbytes, "times": times})
    gc.shutdown()
    dist.destroy_process_group()
    return results


def rows_of(world: int, ranks: list[list[dict[str, Any]]]) -> list[Row]:
    """Medians over calls of the slower rank."""
    rows = []
    for sizes in zip(*ranks, strict=True):
        slower = {
            way: list(map(max, zip(*(one["times"][way] for one in sizes), strict=True)))
            for way in ("gloo", "gradcomp", "copied")
        }
        medians = [statistics.median(times) for times in slower.values()]
        fast = [statistics.quantiles(slower[way], n=10)[0] for way in ("gloo", "gradcomp")]
        rows.append(Row(world, sizes[0]["nbytes"], *medians, *fast))
    return rows


def launch_ranks(world: int, arguments: list[str]) -> list[Any]:
    """Run a script as ranks of this host, and return what each wrote as JSON to the file ``--out``."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as directory:
        ranks = []
        for rank in range(world):
            env = {
                "RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world,
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1,
            }  # fmt: skip
            command = [sys.executable, *arguments, "--out", f"{directory}/{rank}"]
            ranks.append(subprocess.Popen(command, env={**os.environ, **{k: str(v) for k, v in env.items()}}))
        if any(status for status in [process.wait() for process in ranks]):
            raise SystemExit("a rank failed")
        return [json.loads(Path(directory, str(rank)).read_text()) for rank in range(world)]


def table(rows: list[Row]) -> str:
    headers = [
        "bytes",
        "ranks",
        "gloo ms",
        "gradcomp ms",
        "more ms",
        "ratio",
        "gloo fast",
        "gradcomp fast",
        "copied ms",
        "bar",
    ]
    return report.table(
        headers,
        [
            [
                f"{row.nbytes >> 10} KB", row.world, f"{row.gloo_ms:.3f}", f"{row.gradcomp_ms:.3f}",
                f"{row.gradcomp_ms - row.gloo_ms:.3f}", f"{row.gradcomp_ms / row.gloo_ms:.2f}",
                f"{row.gloo_fast_ms:.3f}", f"{row.gradcomp_fast_ms:.3f}", f"{row.copied_ms:.3f}", row.bar,
            ]
            for row in rows
        ],
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.out:
        arguments.out.write_text(json.dumps(measure(arguments.rounds)))
        return
    machine = report.machine()
    print(report.describe(machine))
    rows = rows_of(
        arguments.world, launch_ranks(arguments.world, [__file__, "--rounds", str(arguments.rounds)])
    )
    print(table(rows))
    if arguments.json:
        arguments.json.write_text(
            json.dumps({"machine": machine, "rows": [asdict(row) for row in rows]}, indent=2) + "\n"
        )
    sys.exit(any(row.missed for row in rows))


if __name__ == "__main__":
    main()
