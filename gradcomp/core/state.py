"""State in double-buffered arenas, read by this step and written for the next.

Every exchange reads the current value of a row and writes the next one to the other buffer. Committing a row swaps the
two; discarding a step costs nothing. Rows are layers for residuals and fields, and ranges of layers for server-side
errors.
Memory: 8 bytes per element.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gradcomp.core.vectors import LINE, Floats, Indices, Vector, Zeros, host_zeros


class DoubleBuffer:
    """Rows of float32, each with a current value in one of two arenas and its next value in the other.

    ``lengths``: elements per row. All rows start at zero, and at a cache line, so that kernels can use streaming
    stores. ``zeros`` allocates them.
    """

    def __init__(self, lengths: Sequence[int], zeros: Zeros = host_zeros) -> None:
        self.lengths: Indices = np.asarray(lengths, dtype=np.int64)
        padded = -(-self.lengths // LINE) * LINE
        self._offsets: Indices = np.concatenate(([0], np.cumsum(padded))).astype(np.int64)
        self._total = int(self._offsets[-1])
        self._current = np.zeros(len(self.lengths), dtype=np.int64)
        self._arenas = zeros(2 * self._total)
        self._bases = np.array(
            [self._arenas.address + 4 * self._total * i for i in range(2)], dtype=np.uint64
        )

    @property
    def nbytes(self) -> int:
        return 8 * self._total

    def places(self, rows: Indices) -> tuple[Indices, Indices]:
        """Returns the elements of both arenas at which the rows' current values begin, and their next ones."""
        current = self._current[rows] * self._total
        offsets = self._offsets[rows]
        return current + offsets, self._total - current + offsets

    def turn(self, rows: Indices) -> bytes:
        """Returns which of the two arenas is current for each row: :meth:`places` follows from rows and this."""
        return self._current[rows].tobytes()

    def commit(self, rows: npt.NDArray[np.bool_]) -> None:
        """Make the next value current for the rows where the mask is true."""
        self._current[rows] ^= 1

    def _begin(self, row: int) -> int:
        return int(self._current[row]) * self._total + int(self._offsets[row])

    def addresses(
        self, rows: Indices, starts: Indices | int
    ) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
        """Returns the addresses of element ``starts[i]`` of row ``rows[i]``'s current value, and of its next value."""
        current = self._current[rows]
        places = ((self._offsets[rows] + starts) * 4).astype(np.uint64)
        return self._bases[current] + places, self._bases[1 - current] + places

    @property
    def memory(self) -> Any:
        """Returns both arenas, for kernels; see :meth:`places`."""
        return self._arenas.memory

    def load(self, rows: Indices) -> Floats:
        """Returns copies of the rows' current values, one after the other."""
        return self._arenas.take(self._places(rows, self._current[rows]))

    def store(self, rows: Indices, values: Floats) -> None:
        """Writes the rows' next values, which ``values`` holds one after the other."""
        self._arenas.put(self._places(rows, 1 - self._current[rows]), values)

    def _places(self, rows: Indices, arenas: Indices) -> Indices:
        lengths = self.lengths[rows]
        begins = arenas * self._total + self._offsets[rows]
        ends = np.cumsum(lengths)
        places: Indices = np.arange(lengths.sum()) + np.repeat(begins - ends + lengths, lengths)
        return places

    def value(self, row: int) -> Floats:
        """Returns the row's current value, read-only; see :meth:`gradcomp.core.vectors.Vector.read`."""
        begin = self._begin(row)
        return self._arenas.read(begin, begin + int(self.lengths[row]))

    def set(self, row: int, values: Floats, start: int = 0) -> None:
        """Replaces the row's current value from element ``start`` on."""
        if len(values):
            self._arenas.write(values, self._begin(row) + start)

    def vector(self, row: int) -> Vector:
        """Returns the memory of the row's current value."""
        begin = self._begin(row)
        return self._arenas.part(begin, begin + int(self.lengths[row]))


@dataclass(frozen=True)
class Range:
    """The ``length`` elements of layer number ``layer`` that begin at element ``start``."""

    layer: int
    start: int
    length: int

    @property
    def end(self) -> int:
        """Returns the index after the last element."""
        return self.start + self.length


class Residuals:
    """The residuals (one row per layer), and the server-side errors of the ranges that this rank owns.

    ``first`` holds the residuals, ``second`` the server-side errors. ``sizes[i]`` is the number of elements kept for
    layer i: its size with error feedback, else 0. Every change keeps this invariant: the mean over ranks of residuals
    plus the owner's server-side error is what has not been applied yet.
    """

    def __init__(self, sizes: Sequence[int], zeros: Zeros = host_zeros) -> None:
        self._zeros = zeros
        self.first = DoubleBuffer(sizes, zeros)
        self.ranges: tuple[Range, ...] = ()
        self.second = DoubleBuffer((), zeros)
        self._range_layers: Indices = np.zeros(0, dtype=np.int64)

    def like(self, sizes: Sequence[int]) -> Residuals:
        """Returns zeros for layers of other sizes, in the same kind of memory."""
        return Residuals(sizes, self._zeros)

    @property
    def nbytes(self) -> int:
        return self.first.nbytes + self.second.nbytes

    def grow(self, sizes: Sequence[int]) -> None:
        """Adds rows for layers that did not keep a residual before; existing values are kept."""
        wanted = np.maximum(self.first.lengths, np.asarray(sizes, dtype=np.int64))
        if np.array_equal(wanted, self.first.lengths):
            return
        fresh = DoubleBuffer(wanted.tolist(), self._zeros)
        for row in np.flatnonzero(self.first.lengths).tolist():
            fresh.set(row, self.first.value(row))
        self.first = fresh

    def commit(self, layers: npt.NDArray[np.bool_]) -> None:
        """Accepts the step for the layers where the mask is true."""
        self.first.commit(layers)
        self.second.commit(layers[self._range_layers])

    def own(self, ranges: Sequence[Range], world: int) -> None:
        """Takes ownership of ``ranges``; server-side errors of ranges that it loses go into its residual, times N.

        A server-side error belongs to the mean, a residual to one of N summands: hence the factor.
        """
        if tuple(ranges) == self.ranges:
            return
        fresh = DoubleBuffer([r.length for r in ranges], self._zeros)
        by_layer: dict[int, list[int]] = {}
        for row, owned in enumerate(ranges):
            by_layer.setdefault(owned.layer, []).append(row)
        for row, old in enumerate(self.ranges):
            values = self.second.value(row)
            if not values.any():
                continue
            left = np.ones(old.length, dtype=np.bool_)
            for new_row in by_layer.get(old.layer, ()):
                new = ranges[new_row]
                lo, hi = max(old.start, new.start), min(old.end, new.end)
                if lo < hi:
                    fresh.set(new_row, values[lo - old.start : hi - old.start], lo - new.start)
                    left[lo - old.start : hi - old.start] = False
            if left.any() and self.first.lengths[old.layer]:
                first = self.first.value(old.layer)[old.start : old.end].copy()
                first[left] += np.float32(world) * values[left]
                self.first.set(old.layer, first, old.start)
        self.ranges = tuple(ranges)
        self.second = fresh
        self._range_layers = np.array([r.layer for r in ranges], dtype=np.int64)


#: Returns a layer's first value of a field, given its previous one, which may be empty or of another length.
Begin = Callable[[Floats], Floats]


class Fields:
    """State of compressors by layer besides residuals, by field name: momentum, the factor of a warm start.

    A layer that no longer uses a field keeps its value, in case it uses the field again.
    """

    def __init__(self, layers: int, zeros: Zeros = host_zeros) -> None:
        self._layers = layers
        self._zeros = zeros
        self._buffers: dict[str, DoubleBuffer] = {}
        self._active: dict[str, npt.NDArray[np.bool_]] = {}

    def __getitem__(self, name: str) -> DoubleBuffer:
        return self._buffers[name]

    @property
    def names(self) -> tuple[str, ...]:
        """Returns the fields that some layer has, or had."""
        return tuple(self._buffers)

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def holder(self, name: str) -> int:
        """Returns the layer that has a field which is kept once for all: see ``Compressor.shared_fields``."""
        return int(np.flatnonzero(self._active[name])[0])

    def arrange(self, wanted: Sequence[Mapping[str, tuple[int, Begin]]]) -> None:
        """Gives every layer the fields in ``wanted[layer]``: name -> (elements, function of the first value)."""
        for name in dict.fromkeys([*self._buffers, *(name for fields in wanted for name in fields)]):
            old = self._buffers.get(name) or DoubleBuffer([0] * self._layers, self._zeros)
            lengths = [
                fields[name][0] if name in fields else int(old.lengths[i]) for i, fields in enumerate(wanted)
            ]
            self._active[name] = np.array([name in fields for fields in wanted])
            if name in self._buffers and lengths == old.lengths.tolist():
                continue
            fresh = DoubleBuffer(lengths, self._zeros)
            for layer, fields in enumerate(wanted):
                value = old.value(layer)
                begins = name in fields and value.size != lengths[layer]
                fresh.set(layer, fields[name][1](value) if begins else value)
            self._buffers[name] = fresh

    def forget(self, name: str) -> None:
        """Sets the values of layers that no longer use a field to zero."""
        if name in self._buffers:
            for layer in np.flatnonzero(~self._active[name]).tolist():
                self._buffers[name].set(layer, np.zeros(int(self._buffers[name].lengths[layer]), np.float32))

    def put(self, name: str, values: Mapping[int, Floats]) -> None:
        """Sets current values by layer; the other layers have none."""
        lengths = [values[i].size if i in values else 0 for i in range(self._layers)]
        buffer = DoubleBuffer(lengths, self._zeros)
        for layer, value in values.items():
            buffer.set(layer, value)
        self._buffers[name] = buffer
        self._active[name] = np.zeros(self._layers, dtype=np.bool_)

    def commit(self, layers: npt.NDArray[np.bool_]) -> None:
        """Accepts the step for the layers where the mask is true."""
        for name, buffer in self._buffers.items():
            buffer.commit(layers & self._active[name])
