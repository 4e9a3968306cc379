"""Losses of a small GPT on a GPU, beside those of the same training on a CPU and beside uncompressed ones.

    python benchmarks/gpu_training.py [--steps 100] [--json PATH]
    python benchmarks/gpu_training.py --device cpu --layers 1 --width 16 --heads 2 ...     # anywhere, beside itself

That ranks agree proves little: they may agree on nonsense. Two ranks train from one start on the same batches, over
Gloo, on the CPU and on the GPU, uncompressed and with each compression. A run passes if

    the first ten losses are within 0.1% of the CPU's: rounding differs, codes do not;
    the mean of the last quarter is within 2% of the CPU's;
    the mean of the last quarter is within the compression's share of the uncompressed one on the same device;
    the uncompressed losses have fallen by a fifth.

Exit status 1 if one does not.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import report
from gpu_ranks import RanksError, add_arguments, host_kernels, launch

#: Compressions, and by what share their last losses may differ from the uncompressed ones.
COMPRESSIONS = {
    "none": 0.0,
    "quantize:bits=4,bucket_size=512": 0.05,
    "topk:density=0.02": 0.25,
    "powersgd:rank=4": 0.25,
}
EARLY, EARLY_SHARE, LATE_SHARE, FALL = 10, 1e-3, 0.02, 0.2


@dataclass(frozen=True)
class Task:
    """What both ranks are told to do."""

    devices: list[str]
    compressions: list[str]
    shape: dict[str, int]
    steps: int
    learning_rate: float


def words_of(count: int, vocabulary: int) -> Any:
    """Numbers with something to learn: each follows from the one before it, but for one in ten, drawn from a seed."""
    import torch

    generator = torch.Generator().manual_seed(7)
    follower = torch.randperm(vocabulary, generator=generator).tolist()
    drawn = torch.randint(vocabulary, (count,), generator=generator).tolist()
    surprises = (torch.rand(count, generator=generator) < 0.1).tolist()
    words = [0]
    for number, surprise in zip(drawn[1:], surprises[1:], strict=True):
        words.append(number if surprise else follower[words[-1]])
    return torch.tensor(words)


def losses(device: str, compression: str, task: Task, initial: Any, words: Any) -> list[float]:
    """Of one run of this rank; the same on all ranks only if they had the same batches."""
    import copy

    import torch
    from gpu_gpt import Shape

    import gradcomp.torch as gc

    shape = Shape(**task.shape)
    model = copy.deepcopy(initial).to(device)
    policy = gc.Policy(compression, filter=gc.Filter(min_elements=64))
    optimizer = gc.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=task.learning_rate, momentum=0.9),
        model.named_parameters(),
        policy,
    )
    generator = torch.Generator().manual_seed(gc.rank())
    found = []
    for _ in range(task.steps):
        starts = torch.randint(len(words) - shape.length, (shape.batch, 1), generator=generator)
        window = words[starts + torch.arange(shape.length + 1)].to(device)
        optimizer.zero_grad()
        loss = model(window[:, :-1].contiguous(), window[:, 1:].contiguous())
        loss.backward()
        optimizer.step()
        found.append(float(loss.detach()))
    return found


def run_rank(task: Task) -> dict[str, dict[str, list[float]]]:
    """Losses by device and compression."""
    import torch
    import torch.distributed as dist
    from gpu_gpt import GPT, Shape

    import gradcomp.torch as gc

    torch.set_num_threads(1)
    for device in task.devices:
        if device.startswith("cuda"):
            torch.cuda.set_device(device)
    dist.init_process_group("gloo")
    gc.init(kernels=host_kernels(), timeout_seconds=30.0, log_level="warning")
    torch.manual_seed(0)
    shape = Shape(**task.shape)
    initial, words = GPT(shape), words_of(20_000, shape.words)
    found = {
        device: {each: losses(device, each, task, initial, words) for each in task.compressions}
        for device in task.devices
    }
    gc.shutdown()
    if dist.is_initialized():
        dist.destroy_process_group()
    return found


def late(curve: list[float]) -> float:
    """The mean of the last quarter."""
    part = curve[-max(1, len(curve) // 4) :]
    return sum(part) / len(part)


def judge(curves: dict[str, dict[str, list[float]]], device: str) -> list[dict[str, Any]]:
    """A row for each compression on the device, with what is wrong with it."""
    rows = []
    for compression, curve in curves[device].items():
        beside, plain = curves["cpu"][compression], curves[device]["none"]
        early = max(abs(a / b - 1) for a, b in zip(curve[:EARLY], beside[:EARLY], strict=True))
        to_cpu, to_plain = late(curve) / late(beside) - 1, late(curve) / late(plain) - 1
        wrong = []
        # NaN is in no range.
        if not early <= EARLY_SHARE:
            wrong.append("first losses")
        if not abs(to_cpu) <= LATE_SHARE:
            wrong.append("last losses beside the CPU's")
        if not abs(to_plain) <= COMPRESSIONS[compression]:
            wrong.append("last losses beside uncompressed ones")
        if compression == "none" and not late(curve) <= (1 - FALL) * curve[0]:
            wrong.append("no training")
        rows.append(
            {
                "compression": compression,
                "first": curve[0],
                "last": late(curve),
                "early_difference": early,
                "to_cpu": to_cpu,
                "to_uncompressed": to_plain,
                "wrong": wrong,
            }
        )
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    headers = (
        "compression",
        "first",
        "last quarter",
        "first ten, to CPU",
        "last, to CPU",
        "to uncompressed",
        "",
    )
    lines = [
        (
            row["compression"],
            *(f"{row[key]:.4f}" for key in ("first", "last")),
            f"{row['early_difference']:.1e}",
            *(f"{row[key]:+.2%}" for key in ("to_cpu", "to_uncompressed")),
            "WRONG: " + ", ".join(row["wrong"]) if row["wrong"] else "",
        )
        for row in rows
    ]
    print(report.table(headers, lines))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda:0", help="beside the CPU (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=100, help="of every run (default: %(default)s)")
    parser.add_argument("--learning-rate", type=float, default=0.2, help="(default: %(default)s)")
    defaults = {"layers": 1, "width": 64, "heads": 4, "words": 64, "length": 32, "batch": 16}
    add_arguments(parser, defaults, 80.0)
    parser.add_argument("--json", type=Path, help="also write the curves here")
    options = parser.parse_args()
    if options.task:
        options.rank_out.write_text(json.dumps(run_rank(Task(**json.loads(options.task)))))
        return 0
    shape = {name: getattr(options, name) for name in defaults}
    devices = list(dict.fromkeys(["cpu", options.device]))
    task = Task(devices, list(COMPRESSIONS), shape, options.steps, options.learning_rate)
    try:
        curves = launch(__file__, asdict(task), options.seconds)[0]
    except RanksError as error:
        print(error)
        return 1
    rows = judge(curves, options.device)
    show(rows)
    report.write_json(
        options.json, {"machine": report.machine(), "settings": asdict(task), "rows": rows, "curves": curves}
    )
    return 1 if any(row["wrong"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
