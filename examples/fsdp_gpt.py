"""Train a small GPT, sharded over the ranks, to continue Python source by characters.

    torchrun --nproc-per-node 2 examples/fsdp_gpt.py
    torchrun --nproc-per-node 2 examples/fsdp_gpt.py --weights none --gradients none     # fully_shard's own bytes

The text is that of the standard library. ``compress_fsdp`` is the only line that fully_shard alone does without.
"""

from __future__ import annotations

import argparse
import math
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

import gradcomp.torch as gc

LENGTH, WIDTH, HEADS, CHARACTERS = 64, 128, 4, 128


class Block(nn.Module):
    """Attention to what came before, and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.projection = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.expand, self.contract = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        queries, keys, values = (
            self.attention(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        )
        attended = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).flatten(2))
        return x + self.contract(functional.gelu(self.expand(self.norm2(x))))


class GPT(nn.Module):
    """(batch, time) characters, and those that follow them, to the mean cross entropy."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(CHARACTERS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(blocks)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CHARACTERS)

    def forward(self, characters: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(characters) + self.position.weight[: characters.shape[1]]
        logits = self.head(self.norm(self.blocks(x)))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def load() -> torch.Tensor:
    """The modules of the standard library that lie side by side, as character codes."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = "".join(path.read_text(encoding="utf-8", errors="ignore") for path in paths)
    return torch.frombuffer(bytearray(text.encode("ascii", errors="ignore")), dtype=torch.uint8).long()


def loss_of(model: nn.Module, text: torch.Tensor, batch: int, generator: torch.Generator) -> torch.Tensor:
    starts = torch.randint(len(text) - LENGTH, (batch, 1), generator=generator)
    pieces = text[starts + torch.arange(LENGTH + 1)]
    return model(pieces[:, :-1], pieces[:, 1:])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--weights", default="quantize:bits=8,bucket_size=1024,rounding=shift")
    parser.add_argument("--gradients", default="quantize:bits=8,bucket_size=1024")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--blocks", type=int, default=3)
    parser.add_argument("--batch", type=int, default=16, help="pieces per rank and step")
    options = parser.parse_args()

    gc.init()  # joins the job that torchrun has started
    torch.manual_seed(0)
    model = GPT(options.blocks)
    mesh = init_device_mesh("cpu", (gc.size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    state = gc.compress_fsdp(model, options.weights, options.gradients, optimizer=optimizer)

    text = load()
    border = len(text) * 9 // 10
    generator = torch.Generator().manual_seed(1 + gc.rank())
    for _ in range(options.steps):
        optimizer.zero_grad()
        loss_of(model, text[:border], options.batch, generator).backward()
        optimizer.step()

    sent = state.statistics()

    def bits() -> float:
        """A character of the held-out text."""
        with torch.no_grad():
            return loss_of(model, text[border:], 64, torch.Generator().manual_seed(0)).item() / math.log(2)

    quantised = bits()
    with state.exact_weights():
        exact = bits()
    if gc.rank() == 0:
        per_step = (sent.weight_bytes + sent.gradient_bytes) / options.steps
        print(
            f"{quantised:.3f} bits a character with quantised weights, {exact:.3f} with the optimizer's own"
        )
        print(f"{per_step:,.0f} bytes sent a rank and step")
    gc.shutdown()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
