"""Train a small GPT over a very slow network: ranks step by themselves, and exchange once in 30 steps.

    torchrun --nproc-per-node 2 examples/local_gpt.py
    torchrun --nproc-per-node 2 examples/local_gpt.py --method diloco --every 15
    torchrun --nproc-per-node 2 examples/local_gpt.py --method every-step       # gradients in every step, to compare

Four hosts at 50 Mbit/s, made of network namespaces (needs root):

    python benchmarks/hosts.py --hosts 4 --link 50mbit -- python examples/local_gpt.py

Model and text are those of fsdp_gpt.py.
"""

from __future__ import annotations

import argparse
import math
import time

import torch
import torch.distributed as dist
from fsdp_gpt import GPT, load, loss_of

import gradcomp.torch as gc


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--method", choices=("sparseloco", "diloco", "every-step"), default="sparseloco")
    parser.add_argument("--every", type=int, default=30, help="steps between two exchanges")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--blocks", type=int, default=3)
    parser.add_argument("--batch", type=int, default=8, help="pieces per rank and step")
    options = parser.parse_args()

    gc.init()  # joins the job that torchrun has started
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = GPT(options.blocks)
    adamw = torch.optim.AdamW(model.parameters(), lr=2e-3)
    if options.method == "every-step":
        optimizer = gc.DistributedOptimizer(adamw, model.named_parameters(), gc.Quantize(bits=4))
    else:
        make = gc.SparseLoCo if options.method == "sparseloco" else gc.DiLoCo
        optimizer = make(model, adamw, options.every)

    text = load()
    border = len(text) * 9 // 10
    generator = torch.Generator().manual_seed(1 + gc.rank())
    begin = time.perf_counter()
    for _ in range(options.steps):
        optimizer.zero_grad()
        loss_of(model, text[:border], options.batch, generator).backward()
        optimizer.step()
    seconds = time.perf_counter() - begin

    with torch.no_grad():
        held_out = loss_of(model, text[border:], 64, torch.Generator().manual_seed(0)).item()
    if gc.rank() == 0:
        sent = optimizer.statistics()
        print(f"{held_out / math.log(2):.3f} bits a character")
        print(f"{sent.wire_bytes / options.steps:,.0f} bytes sent a rank and step, in {sent.steps} exchanges")
        print(f"{1e3 * seconds / options.steps:.0f} ms a step")
    gc.shutdown()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
