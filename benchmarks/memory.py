"""Peak memory of a rank under every compressor, beside DistributedDataParallel.

    python benchmarks/memory.py [--rows none,topk] [--steps 6] [--json PATH]

Two ranks on this host, over Gloo, train an embedding of 16,000 x 512 and six layers of 2,048 x 2,048 (33 M parameters)
by SGD with momentum. Each row has processes of its own. The kernel's high-water mark of resident memory is reset after
two steps without exchange, when parameters, gradients and momentum are there, and read at the end. A figure is what the
mark has risen by, in bytes for each parameter, on the rank that needs more. "at rest" is resident memory between
steps, on the same rank: what is kept. The difference is what a step needs besides: messages, decoded chunks, scratch.
"""

from __future__ import annotations

import argparse
import ctypes
import gc as garbage
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import report
from options import positive
from soak import launch, resident_bytes
from step_rank import distribute

DDP = ("ddp", "ddp, gradients as views", "ddp, fp16 hook", "ddp, PowerSGD hook")
COMPRESSIONS = (
    "none", "bf16", "quantize:bits=8", "quantize:bits=4", "quantize:bits=4,rounding=nearest", "nuqsgd",
    "terngrad", "scaled_sign", "one_bit", "signum", "topk:density=0.01", "topk:density=0.1", "dgc:density=0.001",
    "redsync:density=0.01", "sidco:density=0.01", "threshold:threshold=0.001", "adacomp", "global_topk:density=0.01",
    "random_k:density=0.01", "random_block:density=0.01", "clt_k:density=0.01", "powersgd:rank=4",
    "unbiased_rank:rank=4", "best_rank:rank=4", "spectral_atomo:rank=4", "ef21[topk:density=0.01]",
)  # fmt: skip


@dataclass(frozen=True)
class Found:
    """Bytes for each parameter."""

    peak: float
    rest: float


def peak_bytes() -> int:
    """The high-water mark of resident memory."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return 1024 * int(line.split()[1])
    raise OSError("/proc/self/status does not tell the peak of resident memory")


def settle() -> None:
    """Give free memory back, and let the high-water mark begin here."""
    garbage.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def run_rank(row: str, steps: int) -> dict[str, Any]:
    """What one rank found."""
    import torch
    import torch.distributed as dist

    import gradcomp.torch as gc

    torch.set_num_threads(1)
    torch.manual_seed(0)
    body = [torch.nn.Linear(2048, 2048) for _ in range(6)]
    model = torch.nn.Sequential(torch.nn.Embedding(16_000, 512), torch.nn.Flatten(), *body)
    plain = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    generator = torch.Generator().manual_seed(0)  # equal batches until gradients are exchanged

    def train(module: Any, optimizer: Any, count: int) -> None:
        for _ in range(count):
            optimizer.zero_grad(set_to_none=False)
            module(torch.randint(0, 16_000, (8, 4), generator=generator)).square().mean().backward()
            optimizer.step()

    train(model, plain, 2)
    if row in DDP:
        dist.init_process_group("gloo")
    else:
        gc.init(log_level="warning")
    generator.manual_seed(int(os.environ["RANK"]))
    settle()
    before = resident_bytes()
    if row in DDP:
        if row.endswith("hook"):
            module, _ = distribute(model, "fp16" if "fp16" in row else "powersgd")
        else:
            module = torch.nn.parallel.DistributedDataParallel(
                model, gradient_as_bucket_view=row.endswith("views")
            )
        train(module, plain, steps)
    else:
        opt = gc.DistributedOptimizer(plain, model.named_parameters(), row)
        train(model, opt, steps)
    peak, rest = peak_bytes() - before, resident_bytes() - before
    if row in DDP:
        dist.destroy_process_group()
    else:
        gc.shutdown()
    count = sum(p.numel() for p in model.parameters())
    return {"peak": peak / count, "rest": rest / count}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=lambda text: text.split(";"), help="some rows only, separated by ;")
    parser.add_argument("--steps", type=positive, default=6)
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        print(json.dumps(run_rank(options.rank, options.steps)))
        return 0
    machine, rows = report.machine(), options.rows or [*DDP, *COMPRESSIONS]
    print(report.describe(machine))
    found = {}
    for row in rows:
        ranks = launch([__file__, "--steps", str(options.steps), "--rank", row])
        found[row] = max((Found(**rank) for rank in ranks), key=lambda one: one.peak)
    cells = [[row, f"{one.peak:.1f}", f"{one.rest:.1f}"] for row, one in found.items()]
    print(report.table(["compression", "peak, bytes a parameter", "at rest"], cells))
    figures = {row: vars(one) for row, one in found.items()}
    report.write_json(options.json, {"benchmark": "memory", "machine": machine, "rows": figures})
    return 0


if __name__ == "__main__":
    sys.exit(main())
