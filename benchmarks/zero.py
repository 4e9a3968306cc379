"""Time, bytes and peak memory of a training step of a GPT under ZeroOptimizer, and under others. Needs root.

    python benchmarks/zero.py                       # two hosts, links of 1 Gbit/s
    python benchmarks/zero.py --memory --blocks 1   # peak memory too, each row in a run of its own
    python benchmarks/zero.py --ranks 4 --link unshaped --memory

The model, its batches and how rows take turns are those of benchmarks/sharded.py; held-out losses are those of
benchmarks/sharded_convergence.py. ``local`` exchanges nothing: the time of computation, and the memory of training.

Columns
    exchange   what ZeroOptimizer counts itself: time in its exchanges, for which the program waits
    formula    bytes that a rank sends in a step: (N-1)/N (b_g + b_w) / 8 an element, 8 a quantisation bucket, 4 an
               element of what travels exactly
    interface  what the host's interface sent in a step, without TCP's headers
    peak       with --memory: the most memory of a rank from then on, beyond what it had before the model was made
    predicted  peak of ``local`` - 8 d + 12 d/N + buffers: of chunks of C elements 4 C for decoded values, the codes
               that are sent and received, and 4 C/N for sums. DDP has 4 d for its buckets
    ranks      whether all ranks have the same parameters after the last step, bit for bit
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import itertools
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import hosts
import models
import report
import torch
import torch.distributed as dist
from languages import VOCABULARY
from options import add_timing
from sharded_rank import REPLICATED, SMALL, Row, Task, Trainer, make_trainer, time_blocks
from step_rank import measure_link

import gradcomp.torch as gc
from gradcomp.exchange.requests import even_borders
from gradcomp.torch.zero_exchange import CHUNK_ELEMENTS

TIMED = ("local", "ddp", "optimizer-g4", "zero-exact", "zero-w4g8", "zero-w4g4")
BUCKET = 512


def formula(sizes: list[list[int]], row: Row, rank: int, world: int) -> int:
    """Bytes that a rank of ZeroOptimizer sends in a step, without headers."""
    total = 0
    for shape in sizes:
        size = torch.Size(shape).numel()
        borders = even_borders(size, world)
        parts = [end - begin for begin, end in itertools.pairwise(borders)]
        exact = len(shape) < 2 or size < SMALL
        weights, gradients = (32, 32) if exact or row.bits is None else row.bits
        total += (world - 1) * _coded(parts[rank], weights)
        total += sum(_coded(part, gradients) for j, part in enumerate(parts) if j != rank)
    return total


def _coded(size: int, bits: int) -> int:
    return 4 * size if bits == 32 else -(-size * bits // 8) + 8 * -(-size // BUCKET)


def predicted_bytes(local: float, sizes: list[list[int]], row: Row, world: int) -> float | None:
    """Peak memory, from that of training without exchanges."""
    counts = [torch.Size(shape).numel() for shape in sizes]
    d = sum(counts)
    if row.replicated == "ddp":
        return local + 4 * d
    if row.replicated != "zero" or row.bits is None:
        return local if row.replicated == "local" else None
    chunk = max(CHUNK_ELEMENTS, *counts)
    weights, gradients = row.bits
    codes = max(weights, gradients) / 8 + gradients / 8 * (world - 1) / world
    return local - 8 * d + 12 * d / world + chunk * (4 + codes + 4 / world)


def memory(field: str) -> int:
    """Bytes of this process, by a field of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def run_rank(task: Task, out: Path) -> None:
    """Everything one rank does; writes what it found to a file."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    found: dict[str, Any] = {"link": measure_link(rank, world)}
    gc.init(seed=task.seed)
    text = models.load_text(None, VOCABULARY)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is that from now on
    without = memory("VmRSS")
    trainers = {name: make_trainer(REPLICATED[name], text, rank, world, task.seed) for name in task.rows}
    time_blocks(trainers, task)
    found["peak_bytes"] = memory("VmHWM") - without
    packet, steps = found["link"]["packet_bytes"], task.warmup + task.steps
    found["sizes"] = [list(p.shape) for p in next(iter(trainers.values())).model.parameters()]
    found["rows"] = {name: _found(trainer, packet, steps, task.blocks) for name, trainer in trainers.items()}
    out.with_name(f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    gc.shutdown()
    dist.destroy_process_group()


def _found(trainer: Trainer, packet: int, steps: int, blocks: int) -> dict[str, Any]:
    certain = [t.payload_bytes(packet) for t in trainer.traffic if t.is_certain]
    optimizer, row = trainer.optimizer, trainer.row
    exchange = None
    if isinstance(optimizer, gc.ZeroOptimizer):
        exchange = optimizer.statistics().exchange_seconds / steps / blocks
    bits = b"".join(p.detach().numpy().tobytes() for p in trainer.model.parameters())
    return {
        "seconds": trainer.seconds,
        "loss": statistics.mean(trainer.losses[-5:]),
        "exchange_seconds": exchange,
        "interface_bytes": statistics.median(certain) / steps if certain else None,
        "digest": "" if row.replicated == "local" else hashlib.sha256(bits).hexdigest(),
    }


def evaluate(found: list[dict[str, Any]], names: list[str], world: int) -> dict[str, dict[str, Any]]:
    """By row, what the table shows."""
    results: dict[str, dict[str, Any]] = {}
    for name in names:
        ranks = [each["rows"][name] for each in found]
        row, sizes = REPLICATED[name], found[0]["sizes"]
        interface = [r["interface_bytes"] for r in ranks if r["interface_bytes"] is not None]
        results[name] = {
            "seconds": statistics.median(map(max, zip(*(r["seconds"] for r in ranks), strict=True))),
            "exchange_seconds": max((r["exchange_seconds"] or 0.0) for r in ranks),
            "formula": max(formula(sizes, row, rank, world) for rank in range(world))
            if row.replicated == "zero"
            else None,
            "interface": max(interface, default=None),
            "loss": ranks[0]["loss"],
            "same": len({r["digest"] for r in ranks}) == 1,
        }
    return results


def show(results: dict[str, dict[str, Any]]) -> str:
    base = results.get("ddp", {}).get("seconds")

    def whole(value: float | None, unit: float = 1.0) -> str | None:
        return None if value is None else f"{value * unit:,.0f}"

    lines = [
        [
            name,
            f"{one['seconds'] * 1e3:.1f}",
            f"{one['seconds'] / base:.3f}" if base else None,
            f"{one['exchange_seconds'] * 1e3:.1f}" if one["exchange_seconds"] else None,
            whole(one["formula"]),
            whole(one["interface"]),
            whole(one.get("peak_bytes"), 1e-6),
            whole(one.get("predicted_bytes"), 1e-6),
            "same" if one["same"] else "DIFFER",
            f"{one['loss']:.3f}",
        ]
        for name, one in results.items()
    ]
    head = ["row", "step ms", "x ddp", "exchange ms", "formula", "interface", "peak MB", "predicted MB"]
    return report.table([*head, "ranks", "loss"], lines)


def measure(options: argparse.Namespace) -> None:
    names = options.rows.split(",")
    task = Task(tuple(names), options.blocks, options.steps, options.warmup, options.seed)
    machine = report.machine()
    print(report.describe(machine))
    found = hosts.run_task(hosts.Hosts(options.ranks, options.link), __file__, task)
    link = found[0]["link"]
    print(
        f"{options.ranks} hosts, {options.link} links: {link['bytes_per_second'] * 8e-6:.0f} Mbit/s measured"
    )
    results = evaluate(found, names, options.ranks)
    if options.memory:
        for name in names:
            alone = dataclasses.replace(task, rows=(name,), blocks=1)
            ranks = hosts.run_task(hosts.Hosts(options.ranks, "unshaped"), __file__, alone)
            results[name]["peak_bytes"] = max(rank["peak_bytes"] for rank in ranks)
        for name in names if "local" in names else []:
            local = results["local"]["peak_bytes"]
            predicted = predicted_bytes(local, found[0]["sizes"], REPLICATED[name], options.ranks)
            results[name]["predicted_bytes"] = predicted
    print(show(results))
    about = {
        "benchmark": "zero",
        "machine": machine,
        "link": {"name": options.link, **link},
        "ranks": options.ranks,
    }
    report.write_json(options.json, {**about, "task": dataclasses.asdict(task), "rows": results})


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", default=",".join(TIMED), help=f"of {', '.join(REPLICATED)}")
    parser.add_argument("--link", choices=hosts.LINKS, default="1gbit")
    add_timing(parser, blocks=4, steps=6)
    parser.add_argument(
        "--memory", action="store_true", help="measure peak memory, each row in a run of its own"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = hosts.parse(parser, lambda task, out: run_rank(Task(**json.loads(task)), out))
    if unknown := [name for name in options.rows.split(",") if name not in REPLICATED]:
        parser.error(f"unknown rows {', '.join(unknown)}; there are {', '.join(REPLICATED)}")
    return hosts.exit_code(lambda: measure(options))


if __name__ == "__main__":
    sys.exit(main())
