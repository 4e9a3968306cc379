"""Sums over whole rows on a GPU: blocks sum chunks, and a second kernel joins their sums."""

from __future__ import annotations

from gradcomp.kernels.cuda.call import Call, tiles
from gradcomp.kernels.cuda.layout import Parameter, Ref, Source
from gradcomp.kernels.segments import SegmentTable

_SUMMED = 16 * 4096  # elements that a block of sums.cu sums


class RowSums:
    """The sums that the blocks of sums.cu compute, of several kinds for each row, and their total."""

    def __init__(self, call: Call, table: SegmentTable, kinds: int, source: Source | None = None) -> None:
        begins = tiles(-(-table["length"] // _SUMMED))
        self.blocks = int(begins[-1])
        self.sums, self._workspace = (call.workspace(8 * kinds * self.blocks) for _ in range(2))
        self._call, self._count, self._begins = call, len(table), call.give(begins)
        self.table = call.give(table, source)
        self.rows: tuple[Parameter, ...] = (self.table, self._begins, self._count)

    def join(self, first: Ref, second: Ref | None = None) -> None:
        """Writes the total of each kind of sum, a double for each row."""
        blocks = self._count * (1 if second is None else 2)
        spaces = (self.sums, self._workspace, first, second or 0)
        self._call.launch("sums.cu", "join", blocks, self._begins, self._count, *spaces)
