"""Time of a training step with two versions of gradcomp, which take turns step by step.

    python benchmarks/compare_versions.py --before OLD --after NEW [--pairs 120] [--starts 6] [--rows none]

OLD and NEW are folders that contain an installed ``gradcomp`` with its compiled module. Two ranks of each version
train the same models on this machine, one thread a rank, over the loopback interface. One version steps while the
other waits, and every second pair begins with the other version. All processes start anew several times, because two
processes of one version can differ by several percent for as long as they run. A figure is the median over all pairs
of the time of NEW over that of OLD, where a time is that of the slower rank; the interval is the one that holds this
median in 95% of such samples, by order statistics. The last column has the lowest and the highest median of one start.

Rows: a word LSTM of 10.6 M parameters without compression, at 4 bits, TopK 1% and PowerSGD of rank 4; 200 linear
layers of 64 x 64 at 4 bits and TopK 1%, whose step is mostly bookkeeping; a GPT under FSDP2 whose weights and gradients
travel in 8 bits.
"""

from __future__ import annotations

import argparse
import math
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import report

WORLD, WARMUP = 2, 12
#: Name of a row -> model and compression.
ROWS = {
    "none": ("lstm", "none"),
    "4bit": ("lstm", "quantize:bits=4"),
    "topk": ("lstm", "topk:density=0.01"),
    "powersgd": ("lstm", "powersgd:rank=4"),
    "layers-4bit": ("layers", "quantize:bits=4"),
    "layers-topk": ("layers", "topk:density=0.01"),
    "sharded": ("gpt", "quantize:bits=8"),
}

# --- a rank -------------------------------------------------------------------------------------------------


def make_step(row: str, rank: int) -> Callable[[], None]:
    """Return a function that runs one training step of a row."""
    import models
    import torch

    import gradcomp.torch as gc

    kind, compression = ROWS[row]
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randint(0, 8000, (2, 4, 14), generator=generator)
    model: Any
    if kind == "layers":
        model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(200)))
    else:
        model = models.WordLSTM() if kind == "lstm" else models.WordGPT(8000, 256, 6, 4, 32)
    if kind == "gpt":
        from torch.distributed.fsdp import fully_shard

        for layer in [*model.layers, model]:
            fully_shard(layer)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
        gc.compress_fsdp(model, compression, compression, optimizer=optimizer)
    else:
        gc.broadcast_parameters(model.state_dict(), root_rank=0)
        policy = gc.Policy(compression, filter=gc.Filter(min_elements=1000))
        sgd = torch.optim.SGD(model.parameters(), lr=0.01)
        optimizer = gc.DistributedOptimizer(sgd, model.named_parameters(), policy)

    def loss() -> torch.Tensor:
        found: torch.Tensor = model(torch.ones(4, 64)).square().mean() if kind == "layers" else model(*tokens)
        return found

    def step() -> None:
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()

    return step


def serve(rows: list[str]) -> None:
    """Print the folder of gradcomp; then run the steps that the parent asks for, and print the seconds of each."""
    import torch

    import gradcomp
    import gradcomp.torch as gc

    torch.set_num_threads(1)
    answers, sys.stdout = sys.stdout, sys.stderr
    print(Path(gradcomp.__file__).parent.parent, file=answers, flush=True)
    gc.init()
    steps = {row: make_step(row, gc.rank()) for row in rows}
    for line in sys.stdin:
        begin = time.perf_counter()
        steps[line.strip()]()
        print(time.perf_counter() - begin, file=answers, flush=True)
    gc.shutdown()


# --- the parent process -------------------------------------------------------------------------------------


class Job:
    """The ranks of one version."""

    def __init__(self, folder: Path, rows: list[str]) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        paths = [str(folder), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        common = {"PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1", "WORLD_SIZE": str(WORLD)}
        common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_WORLD_SIZE": str(WORLD)}
        command = [sys.executable, __file__, "--serve", "--rows", ",".join(rows)]
        self._ranks = [
            subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(WORLD)
        ]

        for rank in self._ranks:
            if (found := self._read(rank)) != str(folder):
                raise SystemExit(f"the gradcomp of {found} is imported in place of that of {folder}")

    def _read(self, rank: subprocess.Popen[str]) -> str:
        assert rank.stdout is not None
        line = rank.stdout.readline().strip()
        if not line:
            for each in self._ranks:
                each.kill()
            raise SystemExit("a rank has ended; its error is above")
        return line

    def step(self, row: str) -> float:
        """Return the seconds that the slower rank took for one step."""
        for rank in self._ranks:
            assert rank.stdin is not None
            print(row, file=rank.stdin, flush=True)
        return max(float(self._read(rank)) for rank in self._ranks)

    def close(self) -> None:
        for rank in self._ranks:  # all of them, since each rank waits in shutdown() for the others
            assert rank.stdin is not None
            rank.stdin.close()
        for rank in self._ranks:
            rank.wait()


def interval(ratios: list[float]) -> tuple[float, float]:
    """Return an interval that holds the median with a probability of 95%, by order statistics.

    The k-th smallest and the k-th largest of n values enclose it unless fewer than k values lie on one side of it,
    whose number is binomial. No distribution of the values is assumed.
    """
    ordered, n, k, outside = sorted(ratios), len(ratios), 0, 0.0
    while outside + 2 * math.comb(n, k) / 2**n <= 0.05:
        outside += 2 * math.comb(n, k) / 2**n
        k += 1
    if not k:
        raise SystemExit("--pairs: at least 6, for an interval of 95%")
    return ordered[k - 1], ordered[n - k]


def measure(before: Job, after: Job, row: str, pairs: int) -> tuple[list[float], list[float]]:
    """Return the seconds of each step before and after."""
    for _ in range(WARMUP):
        for job in (before, after):
            job.step(row)
    times: tuple[list[float], list[float]] = ([], [])
    for pair in range(pairs):
        turns = [(times[0], before), (times[1], after)]
        for found, job in turns if pair % 2 == 0 else reversed(turns):
            found.append(job.step(row))
    return times


def summary(row: str, starts: list[tuple[list[float], list[float]]]) -> dict[str, Any]:
    """Return the figures of a row from the seconds that `measure` returned for each start."""
    ratios = [[new / old for old, new in zip(*times, strict=True)] for times in starts]
    low, high = interval([ratio for found in ratios for ratio in found])
    medians = [statistics.median(found) for found in ratios]
    return {
        "row": row,
        "pairs": sum(map(len, ratios)),
        "before": 1e3 * statistics.median(second for before, _ in starts for second in before),
        "after": 1e3 * statistics.median(second for _, after in starts for second in after),
        "ratio": statistics.median(ratio for found in ratios for ratio in found),
        "low": low,
        "high": high,
        "lowest start": min(medians),
        "highest start": max(medians),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", type=Path)
    parser.add_argument("--after", type=Path)
    parser.add_argument("--pairs", type=int, default=120, help="of all starts together")
    parser.add_argument("--starts", type=int, default=6)
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    rows = options.rows.split(",")
    if options.serve:
        serve(rows)
        return
    if options.before is None or options.after is None:
        parser.error("--before and --after name the folders of the two versions")
    machine = report.machine()
    del machine["gradcomp"]  # this process measures nothing
    print(report.describe({**machine, "gradcomp": None}), flush=True)
    times: dict[str, list[tuple[list[float], list[float]]]] = {row: [] for row in rows}
    for _ in range(options.starts):
        before, after = (Job(folder.resolve(), rows) for folder in (options.before, options.after))
        for row in rows:
            times[row].append(measure(before, after, row, math.ceil(options.pairs / options.starts)))
        before.close()
        after.close()
    found = [summary(row, times[row]) for row in rows]
    cells = [
        (
            r["row"],
            f"{r['before']:.1f}",
            f"{r['after']:.1f}",
            f"{r['ratio']:.3f}",
            f"{r['low']:.3f}-{r['high']:.3f}",
            f"{r['lowest start']:.3f}-{r['highest start']:.3f}",
        )
        for r in found
    ]
    print(report.table(["row", "before, ms", "after, ms", "after / before", "95% interval", "starts"], cells))
    report.write_json(options.json, {"machine": machine, "rows": found})


if __name__ == "__main__":
    main()
