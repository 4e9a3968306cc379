"""What ``compression="auto"`` chooses, and whether it was right: on hosts made of network namespaces. Needs root.

    python benchmarks/auto.py                                  # 100 Mbit/s, 1 Gbit/s and unshaped, two hosts
    python benchmarks/auto.py --links 1gbit --ranks 3 --blocks 4 --json auto.json

The word LSTM of step.py with 10.6 M parameters, one rank per host, one thread and one core per rank. The model under
auto trains alone first, until the choice is made. Then it and copies of the model under every choice, given as
``compression=``, alternate in blocks of steps: A B C A B C ... A figure is the median over all steps but the first of
each block, for the slowest rank.

Columns
    predicted  step under the choice, as auto predicted it before it chose
    measured   step of the copy that is compressed like that; in the row of auto, of auto's own model
    error      predicted over measured, less one
    x best     measured over the shortest measured step of all choices
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hosts
import models
import report
from options import add_timing
from step_rank import BATCH, LENGTH, make_trainer, run_block
from step_rows import Row

CHOICES = ("none", "bf16", "quantize:bits=8", "quantize:bits=4")
ROWS = (*(Row(text, text, "gradcomp", text) for text in CHOICES), Row("auto", "auto", "gradcomp", "auto"))
#: Steps of auto before the others begin: six to settle, ten to observe, and a few to agree.
LEAD_STEPS = 40


@dataclass(frozen=True)
class Task:
    """What every rank is told to do."""

    blocks: int
    steps: int
    warmup: int
    seed: int


def run_rank(task: Task, out: Path) -> None:
    """Everything one rank does; writes what it found to a file."""
    import torch
    import torch.distributed as dist

    import gradcomp.torch as gc

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    gc.init(seed=task.seed)
    torch.manual_seed(task.seed)
    initial = models.WordLSTM()
    text = models.load_text(None)
    trainers = [make_trainer(row, initial, text, rank, task) for row in ROWS]
    auto = trainers[-1]
    for _ in range(LEAD_STEPS):
        auto.step()
    for _ in range(task.blocks):
        for trainer in trainers:
            run_block(trainer, task, dist.barrier)
    running = auto.optimizer._exchanger_or_none().pipeline.controller
    found = {
        "parameters": sum(p.numel() for p in initial.parameters()),
        "decisions": running.state.decisions,
        "reason": running.reason,
        "chosen": running.current,
        "predicted_seconds": running.state.predicted,
        "measured_seconds": {
            trainer.row.key: statistics.median(itertools.chain.from_iterable(trainer.block_seconds))
            for trainer in trainers
        },
    }
    out.with_name(f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    gc.shutdown()
    if dist.is_initialized():
        dist.destroy_process_group()


def evaluate(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """One link's figures over all ranks."""
    first = ranks[0]
    measured = {row.key: max(rank["measured_seconds"][row.key] for rank in ranks) for row in ROWS}
    best = min(measured[choice] for choice in CHOICES)
    rows = {
        choice: {
            "predicted_seconds": predicted,
            "measured_seconds": measured[choice],
            "error": predicted / measured[choice] - 1,
            "to_best": measured[choice] / best,
        }
        for choice, predicted in zip(CHOICES, first["predicted_seconds"], strict=True)
    }
    chosen = CHOICES[first["chosen"]]
    rows["auto"] = {
        "predicted_seconds": rows[chosen]["predicted_seconds"],
        "measured_seconds": measured["auto"],
        "error": rows[chosen]["predicted_seconds"] / measured["auto"] - 1,
        "to_best": measured["auto"] / best,
    }
    return {"chosen": chosen, "reason": first["reason"], "decisions": first["decisions"], "rows": rows}


def show(links: dict[str, dict[str, Any]]) -> str:
    headers = ["link", "choice", "predicted ms", "measured ms", "error", "x best"]
    cells = []
    for link, found in links.items():
        for key, row in found["rows"].items():
            name = f"auto: {found['chosen']}" if key == "auto" else key
            cells.append(
                [
                    link,
                    name,
                    f"{1e3 * row['predicted_seconds']:.1f}",
                    f"{1e3 * row['measured_seconds']:.1f}",
                    f"{100 * row['error']:+.0f}%",
                    f"{row['to_best']:.2f}",
                ]
            )
    return report.table(headers, cells)


def measure(options: argparse.Namespace) -> None:
    task = Task(options.blocks, options.steps, options.warmup, options.seed)
    found_machine = report.machine()
    print(report.describe(found_machine))
    links: dict[str, dict[str, Any]] = {}
    for link in options.links:
        ranks = hosts.run_task(hosts.Hosts(options.ranks, link), __file__, task)
        links[link] = evaluate(ranks)
        print(f"{link}: {links[link]['reason']}", flush=True)
    print(
        f"{options.ranks} hosts, {ranks[0]['parameters']:,} parameters, batch {BATCH} x {LENGTH}; "
        f"{task.blocks} blocks of {task.steps} steps after {task.warmup}"
    )
    print(show(links))
    report.write_json(
        options.json, {"benchmark": "auto", "machine": found_machine, "ranks": options.ranks, "links": links}
    )


def link_names(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in hosts.LINKS]:
        raise argparse.ArgumentTypeError(f"unknown {', '.join(unknown)}; there are {', '.join(hosts.LINKS)}")
    return names


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--links", type=link_names, default=["100mbit", "1gbit", "unshaped"],
                        help=f"comma-separated: {', '.join(hosts.LINKS)} (default: all)")  # fmt: skip
    add_timing(parser, blocks=5, steps=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write all figures here")
    options = hosts.parse(parser, lambda task, out: run_rank(Task(**json.loads(task)), out))
    return hosts.exit_code(lambda: measure(options))


if __name__ == "__main__":
    sys.exit(main())
