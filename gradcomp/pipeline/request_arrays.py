"""Requests work on one array for each layer, or on one array for all layers."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt

from gradcomp.core.errors import ConfigError
from gradcomp.core.layers import LayerSpec
from gradcomp.core.state import DoubleBuffer
from gradcomp.kernels.codec import Group, Sizes, Table
from gradcomp.kernels.cuda.mirrors import Spans
from gradcomp.kernels.segments import DTYPE_NUMBERS, DTYPES, byte_offsets
from gradcomp.reduce.base import Addresses, Bytes, Memory
from gradcomp.transport.base import Allocator

Array = npt.NDArray[Any]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Blocks:
    """Describes one array that has all layers, in a block for each rank.

    Rank j's shard of layer i begins at ``offsets[i]`` of block j. ``size`` is the number of elements of a block.
    Elements that no shard covers are neither read nor written. An array of shards is one block.
    """

    size: int
    offsets: tuple[int, ...]

    def check(self, layers: Sequence[LayerSpec], shards: Sequence[Sequence[int]]) -> None:
        """Raise ConfigError unless the shards fit into blocks one behind the other."""
        if len(self.offsets) != len(layers) or len({layer.dtype for layer in layers}) != 1:
            raise ConfigError("layers in blocks must have one common dtype and one offset each")
        largest = [int(np.diff(borders).max()) for borders in shards]
        ends = [offset + size for offset, size in zip(self.offsets, largest, strict=True)]
        if self.offsets[0] < 0 or any(
            a > b for a, b in zip(ends, [*self.offsets[1:], self.size], strict=True)
        ):
            raise ConfigError(
                f"shards of {largest} elements do not fit at offsets {list(self.offsets)} of a block of {self.size}"
            )


@dataclass(frozen=True, eq=False)
class Arrays:
    """Implements :class:`gradcomp.reduce.Binding` for one run.

    ``inputs`` and ``output`` have the addresses where element 0 of each layer would be, and of each owner where
    layers are in blocks. ``borders`` are those of the shards, by layer. ``begins`` are the elements of the layers
    with which their residuals begin.
    """

    inputs: Addresses
    output: Addresses
    residuals: DoubleBuffer
    borders: Sizes
    begins: Sizes

    def sources(self, table: Table, layers: Sizes, group: Group, offsets: Addresses | None = None) -> None:
        """Set the addresses that this rank reads from, and those of its residuals."""
        table["gradient"] = self._addresses(self.inputs, table, layers, offsets)
        if group.feedback:
            starts = table["start"] - self.begins[layers]
            table["residual"], table["next_residual"] = self.residuals.addresses(layers, starts)

    def owned(self, table: Table, rows: Sizes) -> None:
        """Fail, since requests keep no server-side error."""
        raise AssertionError("means are not coded again")

    def outputs(self, table: Table, layers: Sizes, offsets: Addresses | None = None) -> None:
        """Set the addresses that this rank writes to."""
        table["output"] = self._addresses(self.output, table, layers, offsets)

    def span(self, name: str) -> AbstractContextManager[None]:
        """Return a context that records nothing."""
        return nullcontext()

    def _addresses(
        self, bases: Addresses, table: Table, layers: Sizes, offsets: Addresses | None
    ) -> Addresses:
        if bases.ndim == 1:
            at = bases[layers]
        else:  # as many inner borders lie before a segment as there are ranks before its owner
            owners = (self.borders[layers, 1:-1] <= table["start"][:, None]).sum(axis=1)
            at = bases[layers, owners]
        found: Addresses = at + (byte_offsets(table) if offsets is None else offsets)
        return found


class SharedMemory:
    """Hands out working memory to requests that never run together: each reuses that of the others.

    The codes of a request are therefore gone once another one has run. A request keeps the memory that it was made
    with, so it is best to make the largest one first.
    """

    def __init__(self, allocate: Allocator) -> None:
        self._allocate = allocate
        self._rooms: list[Bytes] = []

    def memory(self) -> Memory:
        """Return the memory of one more request."""
        taken = count()

        def make(nbytes: int, headers: Spans) -> Bytes:
            place = next(taken)
            if place == len(self._rooms):
                self._rooms.append(self._allocate(nbytes, headers))
            elif len(self._rooms[place]) < nbytes:
                self._rooms[place] = self._allocate(nbytes, headers)
            return self._rooms[place][:nbytes]

        return Memory(make, make)


def bases_of_layers(arrays: Sequence[Array], begins: Sizes) -> Addresses:
    """Return, by layer, where its element 0 would be, if an array begins with element ``begins`` of its layer.

    The address wraps if it would be below 0, and adding an offset wraps it back.
    """
    items = np.array([array.itemsize for array in arrays], dtype=np.int64)
    addresses = np.array([array.ctypes.data for array in arrays], dtype=np.uint64)
    return addresses - (begins * items).astype(np.uint64)


def bases_of_blocks(array: Array, blocks: Blocks, borders: Sizes, own: int | None) -> Addresses:
    """Return the same by layer and owner; with ``own`` the array is only that rank's block."""
    owners = np.arange(borders.shape[1] - 1)
    elements = np.array(blocks.offsets)[:, None] + blocks.size * (owners if own is None else owners - own)
    found: Addresses = np.uint64(array.ctypes.data) + ((elements - borders[:, :-1]) * array.itemsize).astype(
        np.uint64
    )
    return found


def objection_to(
    what: str, arrays: Sequence[Array], names: Sequence[str], shapes: Sequence[Shape], dtypes: Sequence[str]
) -> str | None:
    """Return why these arrays cannot be taken as the ``what`` of a request, or None if they can."""
    if len(arrays) != len(shapes):
        return f"{len(arrays)} {what}s were given where {len(shapes)} are needed"
    for name, dtype_name, array, shape in zip(names, dtypes, arrays, shapes, strict=True):
        dtype, size = DTYPES[DTYPE_NUMBERS[dtype_name]], np.prod(shape, dtype=np.int64)
        if array.dtype != dtype or array.size != size or not array.flags.c_contiguous:
            return (
                f"{name}: the {what} must be a contiguous array of {size} x {dtype}, "
                f"got {array.size} x {array.dtype}"
            )
    return None
