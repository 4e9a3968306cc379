"""Layers and their compressors are packed into exchange buckets, and each bucket's groups get their tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gradcomp.compress.base import Compressor
from gradcomp.compress.blocks import cut
from gradcomp.core.layers import LayerSpec
from gradcomp.kernels.codec import Group, Scratch
from gradcomp.kernels.devices import HOST, Device
from gradcomp.kernels.segments import DTYPE_NUMBERS, SEGMENT

#: The ratio of an exchange bucket's capacity for elements that an allreduce adds to its capacity for encoded elements.
#: Larger messages are faster if no codec overlaps with the network.
SUMMED_PER_CODED = 4


@dataclass(frozen=True)
class Piece:
    """A slice of layer number ``layer``: ``length`` elements from element ``start`` on."""

    layer: int
    start: int
    length: int


def group_of(
    pieces: Sequence[Piece],
    layers: Sequence[LayerSpec],
    compressors: Sequence[Compressor],
    device: Device = HOST,
) -> Group:
    """Make a group of pieces of one family and dtype, each at its own level. The caller adds the addresses later.

    A piece of a layer with levels by block is cut into consecutive segments, one for each block.
    """
    segments = [
        (piece.layer, *part)
        for piece in pieces
        for part in cut(compressors[piece.layer], layers[piece.layer], piece.start, piece.length)
    ]
    table = np.zeros(len(segments), dtype=SEGMENT)
    for row, (layer, start, length, level) in enumerate(segments):
        spec = layers[layer]
        one = table[row : row + 1]
        one["start"], one["length"] = start, length
        one["layer"], one["dtype"] = spec.hash, DTYPE_NUMBERS[spec.dtype]
        compressors[layer].fill(one, level)
    first = compressors[pieces[0].layer]
    return Group(
        first,
        table,
        np.array([layer for layer, *_ in segments], dtype=np.int64),
        first.traits.keeps_residual,
        first.traits.residual_decay,
        tuple(layers[layer].shape for layer, *_ in segments),
        first.traits.follows_rate,
        first.traits.preconditions,
        Scratch(device),
    )


def pack(
    layers: Sequence[LayerSpec],
    compressors: Sequence[Compressor],
    order: Sequence[int],
    cold: frozenset[int],
    bucket_elements: int,
) -> list[list[Piece]]:
    """Return the pieces of every exchange bucket, of the layers numbered in ``order``; those in ``cold`` come last.

    Exchange buckets are filled in order up to ``bucket_elements``, or four times that for layers that an allreduce
    adds; a layer that does not fit is cut where its compressor allows it. Layers outside of ``cold`` whose compressor
    needs the whole model at once share one exchange bucket, which follows those of the other layers outside of
    ``cold``.
    """
    hot = [i for i in order if i not in cold]
    together = [i for i in hot if compressors[i].traits.whole_model]
    buckets = _fill(layers, compressors, [i for i in hot if i not in together], bucket_elements)
    if together:
        buckets.append([Piece(i, 0, layers[i].size) for i in together])
    return buckets + _fill(layers, compressors, [i for i in order if i in cold], bucket_elements)


def by_family(
    pieces: Sequence[Piece], layers: Sequence[LayerSpec], compressors: Sequence[Compressor]
) -> list[list[Piece]]:
    """Divide the pieces of an exchange bucket into groups of one compressor family and dtype each."""
    families: dict[tuple[str, str], list[Piece]] = {}
    for piece in pieces:
        key = (compressors[piece.layer].family_string(), layers[piece.layer].dtype)
        families.setdefault(key, []).append(piece)
    return list(families.values())


def _fill(
    layers: Sequence[LayerSpec], compressors: Sequence[Compressor], part: Sequence[int], capacity: int
) -> list[list[Piece]]:
    buckets: list[list[Piece]] = []
    current: list[Piece] = []
    space = full = capacity * SUMMED_PER_CODED
    for i in part:
        cut = compressors[i].cut_elements(layers[i])
        share = 1 if compressors[i].is_summed(layers[i]) else SUMMED_PER_CODED
        at, size = 0, layers[i].size
        while True:
            left = size - at
            fits = max(space, 0) // share
            take = left if left <= fits else fits // cut * cut
            if left and not take and not current:
                take = min(left, cut)  # one indivisible part exceeds the capacity
            if take or not left:
                current.append(Piece(i, at, take))
                at += take
                space -= take * share
            if at >= size:
                break
            buckets.append(current)
            current, space = [], full
    return [*buckets, current] if current else buckets
