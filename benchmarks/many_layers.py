"""What one more layer costs: steps of models of 200, 1,000 and 10,000 small layers, on two hosts. Needs root.

    python benchmarks/many_layers.py
    python benchmarks/many_layers.py --layers 1000 --blocks 12 --json layers.json
    python benchmarks/many_layers.py --layers 200,1000 --rows none,4bit

A layer is a matrix of 1,000 elements that is added to an activation, so every layer has a gradient of its own, they
come one by one, and forward and backward do almost nothing else: the exchange is as large a part of a step as it can
be. Hosts are network namespaces with unshaped links, one rank per host and one core and thread per rank. All rows live
in the same processes, each with a copy of the model, and alternate in blocks of steps: A B C A B C ... A step is that
of the slower rank; a figure is the median over all steps but the first two of each block.

Columns
    x DDP        median step over that of DistributedDataParallel in the same run
    us a layer   (median step - median step without exchange) / layers
    training     processor time of the training thread, in microseconds a layer beyond that without exchange: hooks and
                 the end of the step, nearly all of it Python
    engine       the same of gradcomp's own thread: NumPy over whole buckets, and native kernels
    transport    the same of all other threads: Gloo's and DDP's
    wake-ups     of all threads, a step

The bars, at 1,000 layers: `none` at most 1.05 x DDP, and 4 bits at most 12 us a layer. A figure that misses is marked.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cpu_by_thread
import hosts
import report
from cpu_by_thread import Used
from options import add_timing

SHAPE = (25, 40)  # a vector would not be compressed
IDEAL, DDP, IDENTITY, BITS4, TOPK = "ideal", "ddp", "none", "4bit", "topk"
ROWS = {
    IDEAL: "no exchange",
    DDP: "DDP",
    IDENTITY: "gradcomp none",
    BITS4: "gradcomp 4 bits",
    TOPK: "gradcomp TopK 1%",
}
COMPRESSIONS = {IDENTITY: "none", BITS4: "quantize:bits=4", TOPK: "topk:density=0.01"}
BAR_LAYERS, MOST_RATIO, MOST_MICROSECONDS = 1000, 1.05, 12.0
TRAINING, ENGINE = "MainThread", "gradcomp"


@dataclass(frozen=True)
class Task:
    """What every rank is told to do."""

    layers: int
    rows: tuple[str, ...]
    blocks: int
    steps: int
    warmup: int
    settings: dict[str, Any]

    @staticmethod
    def from_json(text: str) -> Task:
        data = json.loads(text)
        return Task(**{**data, "rows": tuple(data["rows"])})


@dataclass
class Trainer:
    """One row's model, and what was measured of it."""

    module: Any
    optimizer: Any
    weights: Any
    seconds: list[float] = field(default_factory=list)
    used: dict[str, list[float]] = field(default_factory=dict)
    wakeups: int = 0

    def step(self) -> float:
        began = time.perf_counter()
        self.optimizer.zero_grad()
        self.module(self.weights).backward()
        self.optimizer.step()
        return time.perf_counter() - began

    def block(self, task: Task) -> None:
        for _ in range(task.warmup):
            self.step()
        before = cpu_by_thread.seconds()
        self.seconds += [self.step() for _ in range(task.steps)]
        for name, used in cpu_by_thread.difference(before).items():
            self.count("training" if name == TRAINING else "engine" if name == ENGINE else "transport", used)

    def count(self, part: str, used: Used) -> None:
        self.used.setdefault(part, []).append(used.seconds)
        self.wakeups += used.wakeups


def make_trainer(row: str, layers: int, rank: int) -> Trainer:
    import torch

    class Sums(torch.nn.Module):
        """Adds its parameters one by one, so that their gradients come one by one, the last layer's first."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ParameterList(torch.zeros(SHAPE) for _ in range(layers))
            self.listed = list(self.layers)  # looking each one up would take longer than adding it

        def forward(self, weights: torch.Tensor) -> torch.Tensor:
            activation = torch.zeros(SHAPE)
            for layer in self.listed:
                activation = activation + layer
            return (activation * weights).sum()

    module: Any = Sums()
    optimizer: Any = torch.optim.SGD(module.parameters(), lr=1e-3)
    weights = torch.randn(SHAPE, generator=torch.Generator().manual_seed(rank))
    if row == DDP:
        module = torch.nn.parallel.DistributedDataParallel(module)
    elif row in COMPRESSIONS:
        import gradcomp.torch as gc

        # By default layers of fewer than 1,024 elements, and vectors, are not compressed.
        policy = gc.Policy(COMPRESSIONS[row], filter=gc.Filter(min_elements=1))
        optimizer = gc.DistributedOptimizer(
            optimizer, named_parameters=module.named_parameters(), compression=policy
        )
    return Trainer(module, optimizer, weights)


def run_rank(task: Task, out: Path) -> None:
    """Everything one rank does; writes what it found to a file."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    import gradcomp.torch as gc

    gc.init(**task.settings)
    trainers = {row: make_trainer(row, task.layers, dist.get_rank()) for row in task.rows}
    for _ in range(task.blocks):
        for trainer in trainers.values():
            dist.barrier()
            trainer.block(task)
    steps = task.blocks * task.steps
    found = {
        row: {
            "seconds": trainer.seconds,
            "used": {part: sum(each) / steps for part, each in trainer.used.items()},
            "wakeups": trainer.wakeups / steps,
            "buckets": len(trainer.optimizer.buckets()) if row in COMPRESSIONS else None,
        }
        for row, trainer in trainers.items()
    }
    out.with_name(f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    gc.shutdown()
    if dist.is_initialized():
        dist.destroy_process_group()


def evaluate(task: Task, ranks: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The figures of each row; processor times and wake-ups are the mean over ranks."""
    results: dict[str, dict[str, Any]] = {}
    for row in task.rows:
        slower = [max(both) for both in zip(*(found[row]["seconds"] for found in ranks), strict=True)]
        results[row] = {
            "step_ms": statistics.median(slower) * 1e3,
            "wakeups": statistics.mean(found[row]["wakeups"] for found in ranks),
            "buckets": ranks[0][row]["buckets"],
            "used_us": {
                part: statistics.mean(found[row]["used"].get(part, 0.0) for found in ranks) * 1e6
                for part in ("training", "engine", "transport")
            },
        }
    ideal = results[IDEAL]
    for result in results.values():
        result["ratio"] = result["step_ms"] / results[DDP]["step_ms"]
        result["layer_us"] = (result["step_ms"] - ideal["step_ms"]) * 1e3 / task.layers
        result["layer_used_us"] = {
            part: (used - ideal["used_us"][part]) / task.layers for part, used in result["used_us"].items()
        }
    return results


def missed(row: str, layers: int, result: dict[str, Any]) -> bool:
    """Whether the row has a bar at this number of layers, and misses it."""
    if layers != BAR_LAYERS:
        return False
    if row == IDENTITY:
        return bool(result["ratio"] > MOST_RATIO)
    return row == BITS4 and bool(result["layer_us"] > MOST_MICROSECONDS)


def show(found: dict[int, dict[str, dict[str, Any]]]) -> str:
    headers = [
        "row",
        "layers",
        "step ms",
        "x DDP",
        "us a layer",
        "training",
        "engine",
        "transport",
        "wake-ups",
    ]
    lines = []
    for layers, results in found.items():
        for row, result in results.items():
            used = [f"{result['layer_used_us'][part]:.1f}" for part in ("training", "engine", "transport")]
            beyond = [None] * 4 if row == IDEAL else [f"{result['layer_us']:.1f}", *used]
            mark = " (missed)" if missed(row, layers, result) else ""
            lines.append(
                [
                    f"{ROWS[row]}{mark}",
                    f"{layers:,}",
                    f"{result['step_ms']:.1f}",
                    f"{result['ratio']:.2f}",
                    *beyond,
                    f"{result['wakeups']:.0f}",
                ]
            )
    return report.table(headers, lines)


def measure(options: argparse.Namespace) -> int:
    rows = tuple(dict.fromkeys((IDEAL, DDP, *options.rows)))
    if unknown := [row for row in rows if row not in ROWS]:
        raise SystemExit(f"--rows: unknown {', '.join(unknown)}; there are {', '.join(ROWS)}")
    machine = report.machine()
    print(report.describe(machine))
    found: dict[int, dict[str, dict[str, Any]]] = {}
    for layers in options.layers:
        # A step of many layers is long: fewer of them give as many ticks of processor time.
        steps = max(2, min(options.steps, options.steps * BAR_LAYERS // layers))
        task = Task(layers, rows, options.blocks, steps, options.warmup, dict(options.set))
        ranks = hosts.run_task(hosts.Hosts(options.ranks, "unshaped"), __file__, task)
        found[layers] = evaluate(task, ranks)
        print(show({layers: found[layers]}), flush=True)
    if len(found) > 1:
        print(show(found))
    report.write_json(
        options.json,
        {
            "benchmark": "many_layers",
            "machine": machine,
            "shape": SHAPE,
            "blocks": options.blocks,
            "layers": found,
        },
    )
    return any(
        missed(row, layers, result) for layers, results in found.items() for row, result in results.items()
    )


def parse_setting(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"expected name=value, got {text!r}")
    return name, json.loads(value)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_timing(parser, blocks=6, steps=10)
    parser.add_argument(
        "--layers",
        type=lambda text: [int(each) for each in text.split(",")],
        default=[200, 1000, 10000],
        help="comma-separated numbers of layers (default: 200,1000,10000)",
    )
    parser.add_argument(
        "--rows",
        type=lambda text: text.split(","),
        default=list(ROWS),
        help=f"comma-separated: {', '.join(ROWS)} (default: all)",
    )
    parser.add_argument(
        "--set", action="append", type=parse_setting, default=[], help="a setting of gc.init, as name=value"
    )
    parser.add_argument("--json", type=Path, help="write all figures here")
    options = hosts.parse(parser, lambda task, out: run_rank(Task.from_json(task), out))
    return hosts.exit_code(lambda: measure(options))


if __name__ == "__main__":
    sys.exit(main())
