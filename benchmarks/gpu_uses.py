"""What scripts do on a GPU beside training in the simplest way: two ranks on one GPU, each use beside a plain run.

    python benchmarks/gpu_uses.py without-cupy [--json PATH]
    python benchmarks/gpu_uses.py compile --device cpu --backend aot_eager     # anywhere, beside itself

Uses
    without-cupy   kernels that NVIDIA's bindings call, and gradients that the CPU's kernels exchange where the bindings
                   are missing too: the parameters of a run with CuPy, bit for bit
    compile        torch.compile of the model: parameters that the ranks share, bit for bit, and the losses of an eager
                   run within 1%
    fsdp           compress_fsdp of a model on the GPU, whose tensors travel through the host's memory and are coded
                   there: the losses of fully_shard without compression, exactly if nothing is coded, within 5% at
                   8 bits

Exit status 1 if one does not hold; 77, with the reason as the last line, if this torch has no such use.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import report
from gpu_ranks import RanksError, add_arguments, host_kernels, launch

USES = {
    "without-cupy": ("cupy", "bindings", "neither"),
    "compile": ("eager", "compiled"),
    "fsdp": ("fully_shard", "uncompressed", "8 bits"),
}
#: By run of "without-cupy": what cannot be imported.
HIDDEN = {"bindings": ("cupy",), "neither": ("cupy", "cuda.bindings")}
CODED, NOT_HERE = "quantize:bits=4,bucket_size=64", 77
COMPILED_SHARE, CODED_SHARE = 0.01, 0.05


@dataclass(frozen=True)
class Task:
    """What both ranks are told to do."""

    use: str
    run: str
    device: str
    backend: str
    shape: dict[str, int]
    steps: int


# ------------------------------------------------------------------------------------------ on a rank


def digest(tensors: Any) -> str:
    """Of all bytes of some tensors."""
    made_of = hashlib.sha256()
    for tensor in tensors:
        made_of.update(tensor.detach().cpu().contiguous().view(-1).numpy().tobytes())
    return made_of.hexdigest()


def run_rank(task: Task) -> dict[str, Any]:
    """Losses and a digest of the parameters; "refused" with gradcomp's words if this torch cannot."""
    for name in HIDDEN.get(task.run, ()):
        sys.modules[name] = None  # type: ignore[assignment]
    import torch
    import torch.distributed as dist

    import gradcomp.torch as gc

    torch.set_num_threads(1)
    if task.device.startswith("cuda"):
        torch.cuda.set_device(task.device)
    dist.init_process_group("gloo")
    gc.init(kernels=host_kernels(), timeout_seconds=30.0, log_level="warning")
    torch.manual_seed(0)
    found = {"without-cupy": plain, "compile": compiled, "fsdp": sharded}[task.use](task)
    gc.shutdown()
    if dist.is_initialized():
        dist.destroy_process_group()
    return found


def plain(task: Task) -> dict[str, Any]:
    """A net whose gradients are the same bytes in every run, and who called CUDA for their exchange."""
    import torch

    import gradcomp.torch as gc

    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 128)).to(
        task.device
    )
    # With a power of two as its rate, an update rounds once whether or not it is contracted.
    optimizer = gc.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=2.0**-4),
        model.named_parameters(),
        gc.Policy(CODED, filter=gc.Filter(min_elements=64)),
    )
    losses = []
    for step in range(task.steps):
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(1000 * step + gc.rank()))
        optimizer.zero_grad()
        loss = model(x.to(task.device)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    driver = optimizer._exchanger_or_none().pipeline.device.driver
    by = "the CPU's kernels" if driver is None else type(driver._cuda).__name__
    return {"losses": losses, "parameters": digest(model.parameters()), "by": by}


def batches(task: Task) -> Any:
    """Words for each step, other ones on each rank."""
    import torch
    from gpu_gpt import Shape

    import gradcomp.torch as gc

    shape = Shape(**task.shape)
    generator = torch.Generator().manual_seed(gc.rank())
    for _ in range(task.steps):
        words = torch.randint(shape.words, (shape.batch, shape.length + 1), generator=generator).to(
            task.device
        )
        yield words[:, :-1].contiguous(), words[:, 1:].contiguous()


def train(task: Task, model: Any, optimizer: Any) -> list[float]:
    """The loss of every step."""
    losses = []
    for words, targets in batches(task):
        optimizer.zero_grad()
        loss = model(words, targets)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def compiled(task: Task) -> dict[str, Any]:
    """A GPT, as it is or compiled."""
    import torch
    from gpu_gpt import GPT, Shape

    import gradcomp.torch as gc

    model = GPT(Shape(**task.shape)).to(task.device)
    optimizer = gc.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        model.named_parameters(),
        gc.Policy(CODED, filter=gc.Filter(min_elements=64)),
    )
    run = torch.compile(model, backend=task.backend) if task.run == "compiled" else model
    return {"losses": train(task, run, optimizer), "parameters": digest(model.parameters())}


def sharded(task: Task) -> dict[str, Any]:
    """A GPT that fully_shard has sharded."""
    import torch
    from gpu_gpt import GPT, Shape
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    import gradcomp.torch as gc

    model = GPT(Shape(**task.shape)).to(task.device)
    mesh = init_device_mesh(task.device.partition(":")[0], (gc.size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if task.run != "fully_shard":
        # Two summands are added in one order only, so that without codes nothing may differ.
        options = {"weights": "none", "gradients": "none"} if task.run == "uncompressed" else {}
        try:
            gc.compress_fsdp(model, optimizer=optimizer, **options)
        except gc.ConfigError as error:
            return {"refused": str(error)}
    return {
        "losses": train(task, model, optimizer),
        "parameters": digest(p.to_local() for p in model.parameters()),
    }


# ------------------------------------------------------------------------------------------ what must hold


def close(losses: list[float], beside: list[float], share: float) -> bool:
    """Whether every loss is within a share of the other's; NaN is within none."""
    return all(abs(a / b - 1) <= share for a, b in zip(losses, beside, strict=True))


def judge(use: str, found: dict[str, list[dict[str, Any]]], *, on_gpu: bool) -> list[str]:
    """What does not hold. ``found``: by run, what each rank has found."""
    wrong = []
    first, *others = USES[use]
    if use != "fsdp":  # of which every rank holds other parameters
        wrong += [
            f"{run}: the ranks differ"
            for run, ranks in found.items()
            if len({r["parameters"] for r in ranks}) > 1
        ]
    for run in others:
        for rank, (mine, plain) in enumerate(zip(found[run], found[first], strict=True)):
            if use == "without-cupy":
                holds = mine["parameters"] == plain["parameters"]
            elif run == "uncompressed":
                holds = mine["losses"] == plain["losses"]
            else:
                share = COMPILED_SHARE if use == "compile" else CODED_SHARE
                holds = close(mine["losses"], plain["losses"], share)
            if not holds:
                wrong.append(f"{run}: rank {rank} is not as in {first!r}")
    if use == "without-cupy" and on_gpu:
        callers = {run: ranks[0]["by"] for run, ranks in found.items()}
        if len(set(callers.values())) < len(callers):
            wrong.append(f"not every run went another way: {callers}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("use", nargs="?", choices=list(USES), help="see above")
    parser.add_argument("--device", default="cuda:0", help="of both ranks (default: %(default)s)")
    parser.add_argument("--backend", default="inductor", help="of torch.compile (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=6, help="of every run (default: %(default)s)")
    defaults = {"layers": 2, "width": 64, "heads": 4, "words": 64, "length": 32, "batch": 4}
    add_arguments(parser, defaults, 50.0)
    parser.add_argument("--json", type=Path, help="also write the figures here, run by run")
    options = parser.parse_args()
    if options.task:
        options.rank_out.write_text(json.dumps(run_rank(Task(**json.loads(options.task)))))
        return 0
    if options.use is None:
        parser.error(f"name a use: {', '.join(USES)}")
    shape = {name: getattr(options, name) for name in defaults}
    found: dict[str, list[dict[str, Any]]] = {}
    for run in USES[options.use]:
        task = Task(options.use, run, options.device, options.backend, shape, options.steps)
        try:
            found[run] = launch(__file__, asdict(task), options.seconds)
        except RanksError as error:
            print(f"{run}: {error}")
            return 1
        report.write_json(options.json, {"use": options.use, "device": options.device, "runs": found})
        if refused := found[run][0].get("refused"):
            print(refused)
            return NOT_HERE
        by = found[run][0].get("by")
        print(f"{run}{f', by {by}' if by else ''}: last loss {found[run][0]['losses'][-1]:.4f}", flush=True)
    wrong = judge(options.use, found, on_gpu=options.device.startswith("cuda"))
    print("\n".join(wrong) or "all holds")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
