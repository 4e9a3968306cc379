"""What benchmarks/gpu_step.py and gpu_training.py train: a GPT, and the words that it reads."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Shape:
    """Of the model and of a batch; the defaults are those of 124 M parameters."""

    layers: int = 12
    width: int = 768
    heads: int = 12
    words: int = 50_257
    length: int = 512
    batch: int = 4


class _Block(nn.Module):
    """Attention to what came before, then two layers; each behind a norm and beside a shortcut."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self._heads = shape.heads
        self.norm1 = nn.LayerNorm(shape.width)
        self.attention = nn.Linear(shape.width, 3 * shape.width)
        self.projection = nn.Linear(shape.width, shape.width)
        self.norm2 = nn.LayerNorm(shape.width)
        self.inner = nn.Linear(shape.width, 4 * shape.width)
        self.outer = nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.attention(self.norm1(x)).view(batch, length, 3, self._heads, -1).permute(2, 0, 3, 1, 4)
        found = functional.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        x = x + self.projection(found.transpose(1, 2).reshape(batch, length, width))
        return x + self.outer(functional.gelu(self.inner(self.norm2(x))))


class GPT(nn.Module):
    """Returns the mean cross entropy of the next word; the embedding is the output's matrix, too."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.words, shape.width)
        self.places = nn.Embedding(max(shape.length, 1024 if shape.width == 768 else 0), shape.width)
        self.blocks = nn.Sequential(*(_Block(shape) for _ in range(shape.layers)))
        self.norm = nn.LayerNorm(shape.width)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean over all positions; both (batch, length), int64."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.norm(self.blocks(self.embedding(tokens) + self.places(places)))
        logits = functional.linear(hidden, self.embedding.weight)
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
