"""What a small collective of Gloo costs under two scheduling policies of Gloo's own thread. Needs root.

    python benchmarks/gloo_threads.py
    python benchmarks/gloo_threads.py --hosts 4 --link 1gbit --json gloo.json

One rank per host, each bound to one core. Every rank makes one group of Gloo. Rows alternate: for each size and policy,
all-to-alls that each wait for the one before. `gradcomp.transport.torch` sets the policy SCHED_BATCH for its groups.

Columns
    us      the time of one all-to-all, the median over blocks, of the slowest rank
    cpu us  processor time of a rank in that time, of all its threads
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import hosts
import report

SIZES = (64, 32 << 10)
POLICIES = ("SCHED_OTHER", "SCHED_BATCH")


@dataclass(frozen=True)
class Task:
    """What every rank is told to do."""

    blocks: int
    collectives: int

    @staticmethod
    def from_json(text: str) -> Task:
        return Task(**json.loads(text))


def run_rank(task: Task, out: Path) -> None:
    import torch
    import torch.distributed as dist

    from gradcomp.transport.torch import threads_of_gloo

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    before = threads_of_gloo()
    store = dist.PrefixStore("measured", dist.distributed_c10d._get_default_store())
    group = dist.ProcessGroupGloo(store, rank, world, timedelta(seconds=60))
    threads = threads_of_gloo() - before
    rows: dict[str, list[list[float]]] = {}
    for _ in range(task.blocks):
        for nbytes in SIZES:
            send, receive = torch.zeros((2, nbytes * (world - 1)), dtype=torch.uint8)
            splits = [0 if other == rank else nbytes for other in range(world)]
            for policy in POLICIES:
                for thread in threads:
                    os.sched_setscheduler(thread, getattr(os, policy), os.sched_param(0))
                group.barrier().wait()
                began, used = time.perf_counter(), _processor_seconds()
                for _ in range(task.collectives):
                    group.alltoall_base(receive, send, splits, splits).wait()
                row = [time.perf_counter() - began, _processor_seconds() - used]
                rows.setdefault(f"{nbytes} {policy}", []).append([each / task.collectives for each in row])
    out.with_name(f"{rank}.json").write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def _processor_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def measure(options: argparse.Namespace) -> int:
    machine = report.machine()
    print(report.describe(machine))
    found: list[dict[str, Any]] = hosts.run_task(
        hosts.Hosts(options.hosts, options.link), __file__, Task(options.blocks, options.collectives)
    )
    print(f"{options.hosts} hosts, {options.link} links, {options.blocks} blocks of {options.collectives}\n")
    print("| bytes to a rank | policy | us | cpu us |\n|---:|---|---:|---:|")
    rows = {}
    for name in found[0]:
        blocks = zip(*(rank[name] for rank in found), strict=True)
        slowest = [[max(values) for values in zip(*block, strict=True)] for block in blocks]
        seconds, used = map(statistics.median, zip(*slowest, strict=True))
        rows[name] = {"seconds": seconds, "processor_seconds": used}
        nbytes, policy = name.split()
        print(f"| {int(nbytes):,} | {policy} | {1e6 * seconds:.0f} | {1e6 * used:.0f} |")
    about = {"benchmark": "gloo_threads", "machine": machine, "hosts": options.hosts, "link": options.link}
    report.write_json(options.json, about | {"rows": rows})
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--link", choices=hosts.LINKS, default="unshaped")
    parser.add_argument("--blocks", type=int, default=7)
    parser.add_argument("--collectives", type=int, default=300, help="of a block")
    parser.add_argument("--json", type=Path)
    options = hosts.parse(parser, lambda task, out: run_rank(Task.from_json(task), out))
    return hosts.exit_code(lambda: measure(options))


if __name__ == "__main__":
    sys.exit(main())
