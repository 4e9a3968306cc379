"""The GPTs that benchmarks train, and their texts: words, or byte pairs, which let a small model leave its plateau."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import models
from torch import Tensor, nn
from torch.nn import functional

BATCH, LENGTH, VOCABULARY = 4, 32, 8000
LEARNING_RATE = 1e-3
HELD_OUT = 16_384  # words, of the held-out text


@dataclass(frozen=True)
class Language:
    """A GPT and how it is trained, by default on words. ``length`` and ``batch`` are those of a rank's sequences."""

    vocabulary: int = VOCABULARY
    width: int = 256
    blocks: int = 6
    length: int = LENGTH
    batch: int = BATCH
    learning_rate: float = LEARNING_RATE
    betas: tuple[float, float] = (0.9, 0.999)
    byte_pairs: bool = False
    cosine: bool = False  # the learning rate rises and falls

    @property
    def adamw(self) -> dict[str, Any]:
        return {"lr": self.learning_rate, "betas": self.betas}

    def text(self, path: Path | None) -> models.Text:
        load = models.load_byte_pairs if self.byte_pairs else models.load_text
        return load(path, self.vocabulary)


LANGUAGES = {
    "words": Language(),
    "pairs": Language(512, 192, 4, 64, 8, 1e-3, (0.9, 0.95), byte_pairs=True, cosine=True),
}
#: 0.27 million parameters, which take minutes to a loss of 2.8. Of rates of 2e-3 and 4e-3 this one was better.
LANGUAGES["small"] = replace(LANGUAGES["pairs"], width=64, learning_rate=4e-3)


class GPT(models.WordGPT):
    """With an output layer of its own: about 9 million parameters on words, 2 million on byte pairs."""

    def __init__(self, language: Language = LANGUAGES["words"]) -> None:
        super().__init__(language.vocabulary, language.width, language.blocks, 4, language.length)
        self.head = nn.Linear(language.width, language.vocabulary, bias=False)
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position.weight[: tokens.shape[1]]
        logits = self.head(self.norm(self.layers(x)))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
