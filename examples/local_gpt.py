"""Train a small GPT over a very slow network: ranks step by themselves, and exchange once in 30 steps.

    torchrun --nproc-per-node 2 examples/local_gpt.py
    torchrun --nproc-per-node 2 examples/local_gpt.py --method diloco --every 15
    torchrun --nproc-per-node 2 examples/local_gpt.py --method every-step       # gradients in every step, to compare

Four hosts at 50 Mbit/s, made of network namespaces (needs root):

    python benchmarks/hosts.py --hosts 4 --link 50mbit -- python examples/local_gpt.py

The text is that of the standard library, by characters.
"""

from __future__ import annotations

import argparse
import math
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import gradcomp.torch as gc

LENGTH, WIDTH, CHARACTERS = 64, 128, 128


class GPT(nn.Module):
    """(batch, time) characters, and those that follow them, to the mean cross entropy."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(CHARACTERS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        block = nn.TransformerEncoderLayer(
            WIDTH, 4, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, blocks, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, CHARACTERS)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH))

    def forward(self, characters: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.blocks(self.embedding(characters) + self.position.weight, self.mask, is_causal=True)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def read_text() -> torch.Tensor:
    """The modules of the standard library that lie side by side, as character codes."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = "".join(path.read_text(encoding="utf-8", errors="ignore") for path in paths)
    return torch.frombuffer(bytearray(text.encode("ascii", errors="ignore")), dtype=torch.uint8).long()


def loss_of(model: nn.Module, text: torch.Tensor, batch: int, generator: torch.Generator) -> torch.Tensor:
    pieces = text[
        torch.randint(len(text) - LENGTH, (batch, 1), generator=generator) + torch.arange(LENGTH + 1)
    ]
    return model(pieces[:, :-1], pieces[:, 1:])


def make_optimizer(method: str, every: int, model: nn.Module) -> Any:
    adamw = torch.optim.AdamW(model.parameters(), lr=2e-3)
    if method == "every-step":
        return gc.DistributedOptimizer(adamw, model.named_parameters(), gc.Quantize(bits=4))
    make = gc.SparseLoCo if method == "sparseloco" else gc.DiLoCo
    return make(model, adamw, every)


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
    optimizer = make_optimizer(options.method, options.every, model)

    text = read_text()
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
