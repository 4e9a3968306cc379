"""What the benchmarks train: a word LSTM and a GPT on text, a small network on digits, ResNets on CIFAR-10."""

from __future__ import annotations

import itertools
import re
import sysconfig
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 10_000


class WordLSTM(nn.Module):
    """Language model that returns its mean cross entropy; 10.6 M parameters with the defaults."""

    def __init__(self, vocabulary: int = VOCABULARY, width: int = 400, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, layers, batch_first=True)
        self.output = nn.Linear(width, vocabulary)
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean over all positions; both (batch, time), int64."""
        hidden, _ = self.lstm(self.embedding(tokens))
        return functional.cross_entropy(self.output(hidden).flatten(0, 1), targets.flatten())


class _Layer(nn.Module):
    """Attention to what came before, then two linear layers, each behind a norm and beside a shortcut."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.expand, self.contract = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.attention(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).flatten(2))
        return x + self.contract(functional.gelu(self.expand(self.norm2(x))))


class WordGPT(nn.Module):
    """Language model that returns its mean cross entropy; the output layer is the embedding, as in GPT-2."""

    def __init__(self, vocabulary: int, width: int, layers: int, heads: int, length: int) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.layers = nn.Sequential(*(_Layer(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        for weight in (p for p in self.parameters() if p.ndim == 2):
            nn.init.normal_(weight, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean over all positions; both (batch, time), int64."""
        x = self.embedding(tokens) + self.position.weight[: tokens.shape[1]]
        logits = functional.linear(self.norm(self.layers(x)), self.embedding.weight)
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class DigitsCNN(nn.Module):
    """For 8 x 8 images of digits; returns logits."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution1 = nn.Conv2d(1, 32, 3, padding=1)
        self.norm1 = nn.BatchNorm2d(32)
        self.convolution2 = nn.Conv2d(32, 64, 3, padding=1)
        self.norm2 = nn.BatchNorm2d(64)
        self.hidden = nn.Linear(64 * 4 * 4, 128)
        self.output = nn.Linear(128, 10)

    def forward(self, images: Tensor) -> Tensor:
        """(batch, 1, 8, 8) -> (batch, 10)."""
        x = functional.relu(self.norm1(self.convolution1(images)))
        x = functional.max_pool2d(functional.relu(self.norm2(self.convolution2(x))), 2)
        return self.output(functional.relu(self.hidden(x.flatten(1))))


class _Block(nn.Module):
    """Two 3 x 3 convolutions beside a shortcut, which is a 1 x 1 convolution where the shape changes."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, width, 1, stride, bias=False), nn.BatchNorm2d(width)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.bn1(self.conv1(x)))
        return functional.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """Basic-block ResNet for 32 x 32 images: a 3 x 3 stem, stages of ``blocks[i]`` blocks and doubling width.

    ``ResNet((2, 2, 2, 2), 64)`` is ResNet-18 as CIFAR-10 knows it (11.2 M parameters), ``ResNet((3, 3, 3), 16)`` is
    ResNet-20 (0.27 M).
    """

    def __init__(self, blocks: Sequence[int], width: int, classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        stages: list[nn.Module] = []
        inputs = width
        for stage, count in enumerate(blocks):
            for block in range(count):
                outputs = width << stage
                stages.append(_Block(inputs, outputs, 2 if stage and not block else 1))
                inputs = outputs
        self.stages = nn.Sequential(*stages)
        self.fc = nn.Linear(inputs, classes)

    def forward(self, images: Tensor) -> Tensor:
        """(batch, 3, height, width) -> (batch, classes)."""
        x = self.stages(functional.relu(self.bn1(self.conv1(images))))
        return self.fc(x.mean((2, 3)))


class Deep(nn.Module):
    """Six 3 x 3 convolutions for 16 x 16 images, then seven linear layers with 95% of its 6.1 M parameters.

    Its first layers are small and take most of the time, as in the networks of AlexNet's and VGG's kind.
    """

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        parts: list[nn.Module] = []
        inputs = 3
        for width in (32, 64, 128):
            parts += [nn.Conv2d(inputs, width, 3, padding=1), nn.ReLU()]
            parts += [nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
            inputs = width
        self.convolutions = nn.Sequential(*parts)
        sizes = [inputs * 2 * 2, *(1024,) * 6]
        self.linear = nn.Sequential(
            *(layer for n, m in itertools.pairwise(sizes) for layer in (nn.Linear(n, m), nn.ReLU()))
        )
        self.output = nn.Linear(sizes[-1], classes)

    def forward(self, images: Tensor) -> Tensor:
        """(batch, 3, 16, 16) -> (batch, classes)."""
        return self.output(self.linear(self.convolutions(images).flatten(1)))


class Classifier(nn.Module):
    """A network with its mean cross entropy."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """Mean over images."""
        return functional.cross_entropy(self.network(images), labels)


# ------------------------------------------------------------------------------------------------- images


@dataclass(frozen=True)
class Noise:
    """Random images of 16 x 16 pixels and labels, where times alone matter."""

    images: int = 64

    @property
    def source(self) -> str:
        return f"{self.images} random images of 16 x 16 pixels in place of a text"

    def batches(self, rank: int, batch: int, length: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Endless; every rank draws its own. The sizes are those of a text, and not used."""
        generator = torch.Generator().manual_seed(seed * 1_000_003 + rank)
        while True:
            images = torch.randn(self.images, 3, 16, 16, generator=generator)
            yield images, torch.randint(10, (self.images,), generator=generator)


@dataclass(frozen=True)
class Images:
    """A training and a test set, the same split on all ranks. ``margin``: pixels by which images may be shifted."""

    images: Tensor
    labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    margin: int = 0

    def augmented(self, numbers: Tensor, generator: torch.Generator) -> Tensor:
        """Training images; with a margin, each one flipped or not and shifted at random, with zeros at its border."""
        images = self.images[numbers]
        if not self.margin:
            return images
        count, _, height, width = images.shape
        flip = torch.rand(count, generator=generator) < 0.5
        images = torch.where(flip[:, None, None, None], images.flip(3), images)
        shifts = torch.randint(2 * self.margin + 1, (2, count, 1), generator=generator)
        rows, columns = shifts[0] + torch.arange(height), shifts[1] + torch.arange(width)
        padded = functional.pad(images, (self.margin,) * 4).permute(0, 2, 3, 1)
        which = torch.arange(count)[:, None, None]
        return padded[which, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def load_digits(seed: int = 0) -> Images:
    """scikit-learn's 1,797 digits in [0, 1], half of them held out; the split depends on the seed only."""
    from sklearn import datasets
    from sklearn.model_selection import train_test_split

    pixels, labels = datasets.load_digits(return_X_y=True)
    images = (pixels.reshape(-1, 1, 8, 8) / 16.0).astype(np.float32)
    parts = train_test_split(images, labels, test_size=0.5, stratify=labels, random_state=seed)
    train, test, train_labels, test_labels = (torch.from_numpy(np.ascontiguousarray(p)) for p in parts)
    return Images(train, train_labels.long(), test, test_labels.long())


def load_cifar(path: Path) -> Images:
    """CIFAR-10 from an .npz of x_train, y_train, x_test, y_test (uint8, 32 x 32 x 3), averaged to 16 x 16 pixels.

    A quarter of the pixels takes a quarter of the time; layers and gradients of a ResNet stay what they are.
    """
    if not path.is_file():
        raise SystemExit(f"--cifar: there is no file {path}")
    with np.load(path) as arrays:
        found = {name: torch.from_numpy(arrays[name]) for name in ("x_train", "y_train", "x_test", "y_test")}

    def images(pixels: Tensor) -> Tensor:
        small = functional.avg_pool2d(pixels.permute(0, 3, 1, 2).float() / 255, 2)
        return ((small - 0.473) / 0.25).contiguous(memory_format=torch.channels_last)

    return Images(
        images(found["x_train"]),
        found["y_train"].long(),
        images(found["x_test"]),
        found["y_test"].long(),
        margin=2,
    )


# ------------------------------------------------------------------------------------------------- text


@dataclass(frozen=True)
class Text:
    """Numbers of words or of byte pairs, int64. The last tenth of the text is held out."""

    train: Tensor
    test: Tensor
    source: str

    def batches(self, rank: int, batch: int, length: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Endless (tokens, targets) of shape (batch, length), drawn at random places; every rank draws its own."""
        generator = torch.Generator().manual_seed(seed * 1_000_003 + rank)
        offsets = torch.arange(length + 1)
        while True:
            starts = torch.randint(len(self.train) - length, (batch, 1), generator=generator)
            window = self.train[starts + offsets]
            yield window[:, :-1], window[:, 1:]

    def test_batches(self, batch: int, length: int, limit: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The held-out text in order, at most ``limit`` words of it."""
        rows = min(limit, len(self.test) - 1) // length
        if rows < 1:
            raise ValueError(f"{self.source}: a held-out text of {len(self.test)} words is too short")
        tokens = self.test[: rows * length].view(rows, length)
        targets = self.test[1 : rows * length + 1].view(rows, length)
        yield from zip(tokens.split(batch), targets.split(batch), strict=True)


def load_text(path: Path | None, vocabulary: int = VOCABULARY, limit_words: int = 1_500_000) -> Text:
    """Words of a file, or of the modules of Python's own standard library, numbered by falling frequency."""
    if path is not None:
        if not path.is_file():
            raise SystemExit(f"--data: there is no file {path}")
        words, source = path.read_text(encoding="utf-8").split(), path.name
    else:
        words, source = _standard_library_words(limit_words), "the text of Python's standard library"
    words = words[:limit_words]  # word 0 is "any other word"
    frequent = sorted(Counter(words).items(), key=lambda item: (-item[1], item[0]))[: vocabulary - 1]
    numbers = {word: i + 1 for i, (word, _) in enumerate(frequent)}
    ids = torch.tensor([numbers.get(word, 0) for word in words], dtype=torch.int64)
    border = len(ids) * 9 // 10
    return Text(ids[:border], ids[border:], source)


def load_byte_pairs(path: Path | None, vocabulary: int) -> Text:
    """A file, or the standard library's words, in byte pairs that are learned from what is not held out.

    So few pairs stand for every word that a small model learns them all, and its losses depend little on chance.
    """
    from tokenizers import Tokenizer
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from tokenizers.trainers import BpeTrainer

    if path is not None:
        text, source = path.read_text(encoding="utf-8"), path.name
    else:
        text, source = " ".join(_standard_library_words(250_000)), "the text of Python's standard library"
    border = len(text) * 9 // 10
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    trainer = BpeTrainer(
        vocab_size=vocabulary, show_progress=False, initial_alphabet=sorted(ByteLevel.alphabet())
    )
    tokenizer.train_from_iterator([text[:border]], trainer)
    train, test = (
        torch.tensor(tokenizer.encode(part).ids, dtype=torch.int64) for part in (text[:border], text[border:])
    )
    return Text(train, test, source)


def _standard_library_words(limit: int) -> list[str]:
    """Words and signs of its modules, in an order that puts every kind of module into the held-out end too."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = sorted(
        p for p in root.glob("**/*.py") if not {"site-packages", "dist-packages", "test"} & set(p.parts)
    )
    paths.sort(key=lambda p: zlib.crc32(p.relative_to(root).as_posix().encode()))
    words: list[str] = []
    for path in paths:
        words += re.findall(
            r"[A-Za-z_]+|\d+|[^\sA-Za-z_\d]", path.read_text(encoding="utf-8", errors="ignore")
        )
        if len(words) >= limit:
            break
    return words
