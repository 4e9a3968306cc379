"""Memory of a long run: 20,000 steps of a small model, with a controller that changes plans all the time.

    python benchmarks/soak.py [--steps 20000] [--compression topk:density=0.1] [--controller lgreco:every_steps=50]

Two ranks on this host, over Gloo. The resident memory of each is read every 1,000 steps, after a garbage collection.
The bar: after step 1,000 it grows by 1 MB at most. Parameters are equal on both ranks at the end, or this is an error.
"""

from __future__ import annotations

import argparse
import gc as garbage
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import report

RANKS = 2
EVERY = 1000
BAR_BYTES = 1_000_000


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def run_rank(steps: int, compression: str, controller: str | None) -> dict[str, Any]:
    """What one rank found."""
    import torch

    import gradcomp.torch as gc

    torch.set_num_threads(1)
    gc.init(log_level="warning")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.Tanh(), torch.nn.Linear(96, 10))
    opt = gc.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01),
        model.named_parameters(),
        gc.Policy(compression, filter=gc.Filter(min_elements=64)),
        controller=controller,
    )
    generator = torch.Generator().manual_seed(gc.rank())
    resident = []
    for step in range(steps):
        opt.zero_grad()
        model(torch.randn(8, 64, generator=generator)).square().mean().backward()
        opt.step()
        if (step + 1) % EVERY == 0:
            garbage.collect()
            resident.append(resident_bytes())
    plan = opt.plan()
    gc.shutdown()
    parameters = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    return {
        "resident_bytes": resident,
        "plans": plan.version if plan else 0,
        "parameters": parameters.numpy().tobytes().hex()[:4096],
    }


def launch(command: list[str], world: int = RANKS) -> list[dict[str, Any]]:
    """What each rank prints last, as JSON. ``command``: a script and its arguments."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        subprocess.Popen(
            [sys.executable, *command],
            env={**os.environ, **common, "RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    outputs = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        sys.exit(f"ranks ended with {[rank.returncode for rank in ranks]}")
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--compression", default="topk:density=0.1")
    parser.add_argument("--controller", default="lgreco:every_steps=50")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        print(json.dumps(run_rank(options.steps, options.compression, options.controller or None)))
        return 0
    machine = report.machine()
    found = launch([__file__, *sys.argv[1:], "--rank"])
    rows = []
    for rank, one in enumerate(found):
        resident = one["resident_bytes"]
        growth = (max(resident) - resident[0]) / 1e6
        met = "yes" if growth * 1e6 <= BAR_BYTES else "NO"
        rows.append(
            [f"rank {rank}", options.steps, one["plans"], f"{resident[0] / 1e6:.1f}", f"{growth:.2f}", met]
        )
    headers = ["", "steps", "plans", f"MB after {EVERY} steps", "most growth since, MB", "at most 1 MB"]
    print(report.describe(machine))
    print(report.table(headers, rows))
    equal = len({one["parameters"] for one in found}) == 1
    print("parameters are equal on all ranks" if equal else "PARAMETERS DIFFER")
    if options.json:
        options.json.write_text(
            json.dumps({"machine": machine, "options": vars(options) | {"json": None}, "ranks": found})
        )
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
