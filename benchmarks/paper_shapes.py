"""Compression ratios of the papers' own models, from the shapes of their parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gradcomp import LayerSpec
from gradcomp.compress import from_string
from gradcomp.control.candidates import layer_bytes
from gradcomp.core.scheme import Scheme
from gradcomp.core.topology import Topology

Shape = tuple[int, ...]


def lstm() -> list[Shape]:
    """Vogels et al. 2019, appendix F: an embedding, also the output layer, and three layers of four gates; biases."""
    words, width = 28_869, 650
    return [(words, width), *[(4 * width, width)] * 6, (words,), *[(4 * width,)] * 6]


def resnet50() -> list[Shape]:
    """He et al. 2016, for 1,000 classes; batch normalisation has a weight and a bias."""

    def convolution(of: int, into: int, size: int) -> list[Shape]:
        return [(into, of, size, size), (into,), (into,)]

    shapes, channels = convolution(3, 64, 7), 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            shapes += convolution(channels, width, 1) + convolution(width, width, 3)
            shapes += convolution(width, 4 * width, 1)
            shapes += [] if block else convolution(channels, 4 * width, 1)
            channels = 4 * width
    return [*shapes, (1_000, channels), (1_000,)]


def _transformer(words: int, blocks: int, attention: Sequence[Shape]) -> list[Shape]:
    """Width 512 and 2,048, an embedding that is also the output layer, norms after both halves of a block."""
    width, wide = 512, 2_048
    block = [*attention, (wide, width), (wide,), (width, wide), *[(width,)] * 5]
    return [(words, width), *block * blocks]


def transformer_xl() -> list[Shape]:
    """The base model of NVIDIA's examples, 192 M parameters: 16 blocks, queries, keys and values as one matrix."""
    words = 267_735
    ends: list[Shape] = [(words,), (3, 512), (3,), (8, 64), (8, 64)]
    return _transformer(words, 16, [(1_536, 512), (512, 512), (512, 512)]) + ends


def transformer_lm() -> list[Shape]:
    """The transformer_lm of fairseq, 156 M parameters: 6 blocks, with a matrix for each of queries, keys and values."""
    return _transformer(267_744, 6, [(512, 512)] * 4 + [(512,)] * 4)


def ratio(shapes: Sequence[Shape], compression: str) -> float:
    """Bytes of all gradients over those of a payload. Vectors travel exactly, and what would not be shorter."""
    compressor, where = from_string(compression), (Scheme("sra"), Topology.one_host(2))
    dense = payload = 0.0
    for number, shape in enumerate(shapes):
        exact = 4.0 * math.prod(shape)
        dense += exact
        if len(shape) > 1:
            exact = min(exact, layer_bytes(compressor, LayerSpec(str(number), shape), *where))
        payload += exact
    return dense / payload
