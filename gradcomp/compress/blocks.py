"""Blocks are consecutive rows of a layer that have a level of their own."""

from __future__ import annotations

from gradcomp.compress.base import Compressor
from gradcomp.core.layers import LayerSpec
from gradcomp.core.plan import Level

#: The least number of quantisation buckets per block, averaged over a layer's blocks, that controllers make.
LEAST_BUCKETS = 4


def borders(layer: LayerSpec, count: int, unit: int) -> list[int]:
    """Return the elements at which ``count`` blocks begin, and the one where the last block ends.

    Block i begins with row R i // count of R rows, rounded down to a multiple of ``unit`` elements, so that no two
    blocks share a scale and none is lost. A vector's rows are its elements. Blocks may be empty.
    """
    rows = layer.shape[0] if len(layer.shape) > 1 else layer.size
    width = layer.size // rows if rows else 0
    inner = [rows * i // count * width // unit * unit for i in range(1, count)]
    return [0, *inner, layer.size]


def count_for(layer: LayerSpec, compressor: Compressor, most: int) -> int:
    """Return into how many blocks a controller divides a layer: 1 for a vector or a layer too small for two."""
    if len(layer.shape) < 2 or not compressor.by_block:
        return 1
    return max(min(most, layer.shape[0], layer.size // (LEAST_BUCKETS * unit_of(compressor, layer))), 1)


def unit_of(compressor: Compressor, layer: LayerSpec) -> int:
    """Return the number of consecutive elements of the layer that share a scale."""
    return compressor.bare().cut_elements(layer)


def cut(compressor: Compressor, layer: LayerSpec, start: int, length: int) -> list[tuple[int, int, Level]]:
    """Return the parts of a piece of a layer that lie in one block each, as (start, length, level).

    They follow one another without gaps. A piece without elements is one part.
    """
    level = compressor.level
    if not isinstance(level, tuple):
        return [(start, length, level)]
    at = borders(layer, len(level), unit_of(compressor, layer))
    end = start + length
    cuts = ((max(start, a), min(end, b), own) for own, a, b in zip(level, at[:-1], at[1:], strict=True))
    parts: list[tuple[int, int, Level]] = [
        (first, last - first, own) for first, last, own in cuts if first < last
    ]
    return parts or [(start, length, level[0])]
