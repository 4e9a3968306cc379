"""The launches of select.cu, which finds the largest elements of all rows of a table at once."""

from __future__ import annotations

from typing import NamedTuple

from gradcomp.kernels.cuda.call import THREADS, Call, tiles
from gradcomp.kernels.cuda.layout import Parameter, Ref, Source
from gradcomp.kernels.segments import SegmentTable

_TILE = 16384  # elements that a block reads
_BINS = 2048
_DIGITS = ((20, 11), (10, 10), (0, 10))  # shift and bits, of the 31 bits of a magnitude


class Marks:
    """Memory for a bit per element, which marks the candidates."""

    def __init__(self, call: Call, table: SegmentTable) -> None:
        begins = tiles(-(-table["length"] // 8))
        self.bits, self.begins = call.workspace(int(begins[-1])), call.give(begins)


class Contribution(NamedTuple):
    """The parameters that form c, and the flags of rows that are not finite; by default c is there already."""

    factors: Parameter = 0
    decay: Parameter = 0.0
    bad: Parameter = 0


class RadixSelect:
    """The launches of select.cu for a run's first array, a table; keys.cuh describes the parameters.

    0 stands for an absent parameter.
    """

    def __init__(
        self,
        call: Call,
        table: SegmentTable,
        contribution: Contribution | None = None,
        *,
        wanted: Parameter = 0,
        cuts: Parameter = 0,
        strides: Parameter = 0,
        nan_is_infinite: bool = False,
        candidates: Marks | None = None,
    ) -> None:
        begins = tiles(-(-table["length"] // _TILE))
        self._call, self._table = call, table
        self._rows, self._blocks = len(table), int(begins[-1])
        self._elements: tuple[Parameter, ...] = (
            *(call.give(table, Source(0)), call.give(begins), len(table)),
            *(contribution or Contribution()),
            *(wanted, cuts, strides, int(nan_is_infinite)),
        )
        self._has_cuts = isinstance(cuts, Ref)
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
        """Writes next residuals, and selects nothing."""
        self._launch("contribute", self._blocks)

    def find(self, *, contributing: bool = False) -> None:
        """Finds the key of the last selected element of each row."""
        self._state = (
            self._call.workspace(4 * _BINS * self._rows, zero=True),
            self._call.workspace(8 * self._rows, zero=True),
        )
        self._marks = self._marks or Marks(self._call, self._table)
        first = "histogram_marking" if self._has_cuts else "histogram"
        names = ("contribute_histogram" if contributing else first, "histogram_marking", "histogram")
        for name, digit in zip(names, _DIGITS, strict=True):
            self._launch(name, self._blocks, digit=digit)
            self._launch("pick", self._rows, digit=digit)
            self._marked |= name == "histogram_marking"

    def write(self, offsets: Parameter, indices: Parameter, values: Parameter, found: Parameter = 0) -> None:
        """Writes the selected elements of each row and their number."""
        per_tile = (self._call.workspace(8 * self._blocks), self._call.workspace(8 * self._blocks))
        places = (offsets, indices, values, found)
        self._launch("count", self._blocks, per_tile)
        self._launch("scan", self._rows, per_tile, places)
        self._launch("write_selection", self._blocks, per_tile, places)

    def thresholds(self, out: Parameter) -> None:
        """Writes the magnitude of the last selected element, or infinity where none is wanted."""
        self._launch("threshold", -(-self._rows // THREADS), places=(0, 0, out, 0))
