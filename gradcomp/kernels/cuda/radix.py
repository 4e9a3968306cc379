"""The launches of select.cu: the largest elements of all rows of a table, however many they are."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gradcomp.kernels.cuda.call import THREADS, Call, Parameter, tiles
from gradcomp.kernels.cuda.places import lists_to_write
from gradcomp.kernels.reference_selection import Floats, Indices, Numbers
from gradcomp.kernels.segments import SegmentTable

_TILE = 16384  # elements that a block reads
_BINS = 2048
_DIGITS = ((20, 11), (10, 10), (0, 10))  # shift and bits, of the 31 bits of a magnitude


class Marks:
    """Room for a bit per element: whether it is a candidate."""

    def __init__(self, call: Call, table: SegmentTable) -> None:
        begins = tiles(-(-table["length"] // 8))
        self.bits, self.begins = call.room(int(begins[-1])), call.give(begins)


class RadixSelect:
    """The launches of select.cu for one table; keys.cuh says what the parameters mean, and their absence."""

    def __init__(
        self,
        call: Call,
        table: SegmentTable,
        *,
        factors: Floats | None = None,
        decay: float = 0.0,
        bad: Parameter = 0,
        wanted: Numbers | None = None,
        cuts: npt.NDArray[np.int32] | None = None,
        strides: Numbers | None = None,
        nan_is_infinite: bool = False,
        candidates: Marks | None = None,
    ) -> None:
        begins = tiles(-(-table["length"] // _TILE))
        self._call, self._table = call, table
        self._rows, self._blocks = len(table), int(begins[-1])
        given = [0 if each is None else call.give(each) for each in (factors, wanted, cuts, strides)]
        self._elements: tuple[Parameter, ...] = (
            *(call.give(table), call.give(begins), len(table)),
            *(given[0], float(decay), bad, *given[1:], int(nan_is_infinite)),
        )
        self._has_cuts = cuts is not None
        self._marks = candidates
        self._marked = candidates is not None
        self._state: tuple[Parameter, ...] = (0, 0)

    def _launch(
        self,
        name: str,
        blocks: int,
        per_tile: tuple[Parameter, ...] = (0, 0),
        places: tuple[Parameter, ...] = (0, 0, 0, 0),
        digit: tuple[int, int] = (0, 0),
    ) -> None:
        marks = (0, 0) if self._marks is None else (self._marks.bits, self._marks.begins)
        parameters = (*self._elements, *marks, self._marked, *self._state, *per_tile, *places, *digit)
        self._call.launch("select.cu", name, blocks, *parameters)

    def contribute(self) -> None:
        """Only write shadows."""
        self._launch("contribute", self._blocks)

    def find(self, *, contributing: bool = False) -> None:
        """Find the key of the last element of each row."""
        self._state = (
            self._call.room(4 * _BINS * self._rows, zero=True),
            self._call.room(8 * self._rows, zero=True),
        )
        self._marks = self._marks or Marks(self._call, self._table)
        first = "histogram_marking" if self._has_cuts else "histogram"
        names = ("contribute_histogram" if contributing else first, "histogram_marking", "histogram")
        for name, digit in zip(names, _DIGITS, strict=True):
            self._launch(name, self._blocks, digit=digit)
            self._launch("pick", self._rows, digit=digit)
            self._marked |= name == "histogram_marking"

    def write(
        self,
        offsets: Numbers,
        sizes: Numbers,
        indices: Indices,
        values: Floats,
        found: Numbers | None = None,
    ) -> None:
        """Write the elements up to the last, and how many they are."""
        call = self._call
        per_tile = (call.room(8 * self._blocks), call.room(8 * self._blocks))
        filled = found is None
        places: tuple[Parameter, ...] = (
            call.give(offsets),
            lists_to_write(call, indices, offsets, sizes, all_of_it=filled),
            lists_to_write(call, values, offsets, sizes, all_of_it=filled),
            0 if found is None else call.result(found),
        )
        self._launch("count", self._blocks, per_tile)
        self._launch("scan", self._rows, per_tile, places)
        self._launch("write_selection", self._blocks, per_tile, places)

    def thresholds(self, out: Floats) -> None:
        """Write the magnitude of the last element, or infinity where nothing is wanted."""
        places = (0, 0, self._call.result(out), 0)
        self._launch("threshold", -(-self._rows // THREADS), places=places)
