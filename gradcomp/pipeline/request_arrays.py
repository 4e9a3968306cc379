"""Where the arrays of a request are: one for each layer, or one for all of them."""

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
    """All layers in one array of a block per rank; rank j's shard of layer i begins at ``offsets[i]`` of block j.

    ``size``: elements of a block. What no shard covers is neither read nor written. An array of shards is one block.
    """

    size: int
    offsets: tuple[int, ...]

    def check(self, layers: Sequence[LayerSpec], shards: Sequence[Sequence[int]]) -> None:
        """ConfigError unless the shards fit into blocks one behind the other."""
        if len(self.offsets) != len(layers) or len({layer.dtype for layer in layers}) != 1:
            raise ConfigError("layers in blocks have one dtype, and an offset each")
        largest = [int(np.diff(borders).max()) for borders in shards]
        ends = [offset + size for offset, size in zip(self.offsets, largest, strict=True)]
        if self.offsets[0] < 0 or any(
            a > b for a, b in zip(ends, [*self.offsets[1:], self.size], strict=True)
        ):
            raise ConfigError(
                f"shards of {largest} elements do not fit at {list(self.offsets)} of {self.size}"
            )


@dataclass(frozen=True, eq=False)
class Arrays:
    """The :class:`gradcomp.reduce.Binding` of one run.

    By layer, and by owner where layers are in blocks: where element 0 would be in the inputs and in the output.
    ``borders``: of the shards, by layer. ``begins``: with which element of a layer its residual begins.
    """

    inputs: Addresses
    output: Addresses
    residuals: DoubleBuffer
    borders: Sizes
    begins: Sizes

    def sources(self, table: Table, layers: Sizes, group: Group, offsets: Addresses | None = None) -> None:
        """Where this rank reads, and its residuals."""
        table["gradient"] = self._addresses(self.inputs, table, layers, offsets)
        if group.feedback:
            starts = table["start"] - self.begins[layers]
            table["residual"], table["next_residual"] = self.residuals.addresses(layers, starts)

    def owned(self, table: Table, rows: Sizes) -> None:
        """There is no second residual."""
        raise AssertionError("means are not coded again")

    def outputs(self, table: Table, layers: Sizes, offsets: Addresses | None = None) -> None:
        """Where it writes."""
        table["output"] = self._addresses(self.output, table, layers, offsets)

    def span(self, name: str) -> AbstractContextManager[None]:
        """Nothing is recorded."""
        return nullcontext()

    def _addresses(
        self, bases: Addresses, table: Table, layers: Sizes, offsets: Addresses | None
    ) -> Addresses:
        if bases.ndim == 1:
            at = bases[layers]
        else:  # borders in front of a segment, but for the first, are as many as ranks before its owner
            owners = (self.borders[layers, 1:-1] <= table["start"][:, None]).sum(axis=1)
            at = bases[layers, owners]
        found: Addresses = at + (byte_offsets(table) if offsets is None else offsets)
        return found


class SharedMemory:
    """Working memory of requests that never run together: each reuses that of the others.

    So the codes of a request are gone once another one has run. A request keeps the memory that it was made with, so it
    is best to make the largest one first.
    """

    def __init__(self, allocate: Allocator) -> None:
        self._allocate = allocate
        self._rooms: list[Bytes] = []

    def memory(self) -> Memory:
        """For one request more."""
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
    """By layer, where element 0 would be; it may be below the array, and wraps. ``begins``: the arrays' elements 0."""
    items = np.array([array.itemsize for array in arrays], dtype=np.int64)
    addresses = np.array([array.ctypes.data for array in arrays], dtype=np.uint64)
    return addresses - (begins * items).astype(np.uint64)


def bases_of_blocks(array: Array, blocks: Blocks, borders: Sizes, own: int | None) -> Addresses:
    """By layer and owner. ``own``: the array is the block of this rank, and nobody asks for the others."""
    owners = np.arange(borders.shape[1] - 1)
    elements = np.array(blocks.offsets)[:, None] + blocks.size * (owners if own is None else owners - own)
    found: Addresses = np.uint64(array.ctypes.data) + ((elements - borders[:, :-1]) * array.itemsize).astype(
        np.uint64
    )
    return found


def objection_to(
    what: str, arrays: Sequence[Array], names: Sequence[str], shapes: Sequence[Shape], dtypes: Sequence[str]
) -> str | None:
    """Why these arrays cannot be taken as the ``what`` of a request; None if they can."""
    if len(arrays) != len(shapes):
        return f"{len(arrays)} {what}s where {len(shapes)} are taken"
    for name, dtype_name, array, shape in zip(names, dtypes, arrays, shapes, strict=True):
        dtype, size = DTYPES[DTYPE_NUMBERS[dtype_name]], np.prod(shape, dtype=np.int64)
        if array.dtype != dtype or array.size != size or not array.flags.c_contiguous:
            return (
                f"{name}: the {what} is a contiguous array of {size} x {dtype}, "
                f"got {array.size} x {array.dtype}"
            )
    return None
