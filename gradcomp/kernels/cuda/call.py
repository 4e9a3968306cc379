"""One kernel call: what goes up, what runs, what comes back; one copy each way and one wait, however many rows.

Large messages in pinned memory have copies of their own.

A call is written down first and runs at the end: arrays are given and asked for, launches name them, and :meth:`run`
lays everything out in one piece of device memory (:mod:`gradcomp.kernels.cuda.layout`). A call that comes again in
every step is written down once (:mod:`gradcomp.kernels.cuda.prepared`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gradcomp.kernels.cuda.driver import Driver
from gradcomp.kernels.cuda.layout import (
    KINDS,
    Integer,
    Launch,
    Layout,
    Parameter,
    Real,
    Ref,
    Source,
)
from gradcomp.kernels.cuda.pinned import is_pinned
from gradcomp.kernels.segments import SegmentTable

__all__ = ["GROUP", "THREADS", "Call", "Parameter", "Ref", "Sizes", "groups", "places_of", "tiles"]

Sizes = npt.NDArray[np.int64]

#: Threads of a block in most kernels, and how many elements each takes.
THREADS = 256
GROUP = 8

_VECTOR = 16  # bytes
_SMALL = 1 << 16  # bytes of zeros that are copied up with all else


class Call:
    """See the module. Arrays that lie on the device already are used where they are.

    ``source`` says of an array that each run of a prepared call brings another one of the same size. Where several
    calls become one, :meth:`renumber` says where in a run's arrays and numbers those of each are, and within one of
    them :meth:`part` says it for its parts.
    """

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.kinds: dict[str, list[Ref]] = {kind: [] for kind in KINDS}
        self.launches: list[Launch] = []
        self.lists: list[tuple[Ref, Sequence[Parameter]]] = []
        self._arrays: Sequence[int] = ()
        self._numbers = 0
        self._whole: tuple[Sequence[int], int] = (), 0
        self._shared: dict[tuple[str, int], Ref] = {}

    def renumber(self, arrays: Sequence[int], numbers: int) -> None:
        """From now on array i is number ``arrays[i]`` of a run's, and number i is ``numbers + i``."""
        self._arrays, self._numbers = self._whole = arrays, numbers

    def part(self, arrays: Sequence[int], numbers: int) -> None:
        """The same within what was renumbered last."""
        of, first = self._whole
        self._arrays = [of[i] for i in arrays] if of else arrays
        self._numbers = first + numbers

    # -- memory ---------------------------------------------------------------------------------------------------

    def give(self, array: npt.NDArray[Any], source: Source | None = None) -> Ref:
        """An array that kernels read."""
        found = self._on_device(array, source)
        return found or self._add("inputs", array.nbytes, np.ascontiguousarray(array), source)

    def update(self, array: npt.NDArray[Any], source: Source | None = None) -> Ref:
        """An array that kernels read and write; contiguous."""
        return self._on_device(array, source) or self._add("updated", array.nbytes, array, source)

    def result(self, array: npt.NDArray[Any], source: Source | None = None, *, zero: bool = False) -> Ref:
        """An array that kernels write, all of it unless it begins as ``zero``; contiguous."""
        found = self._on_device(array, source)
        if found is not None:
            if zero and array.nbytes:
                assert source is None, "zeros on the device belong to one run"
                self.driver.zero(found.address, array.nbytes)
            return found
        return self._add("zeroed" if zero else "results", array.nbytes, array, source)

    def workspace(self, nbytes: int, *, zero: bool = False) -> Ref:
        """Memory between kernels."""
        kind = (
            "workspace" if not zero else "zeroed_workspace" if nbytes <= _SMALL else "large_zeroed_workspace"
        )
        return self._add(kind, nbytes, None)

    def read(self, array: npt.NDArray[Any], number: int, begin: int, end: int) -> Ref:
        """A run's array, of which kernels read these bytes; those of the host travel once, whoever reads them."""
        return self._some(array, "inputs", number, begin, end)

    def write(self, array: npt.NDArray[Any], number: int, spans: Sequence[tuple[int, int]]) -> Ref:
        """A run's array, of which kernels write these bytes; nothing else in it changes."""
        if not spans:
            return Ref(0, address=0, on_device=True)
        found = self._some(array, "results", number, spans[0][0], spans[-1][1])
        found.spans += spans
        return found

    def change(self, array: npt.NDArray[Any], number: int, spans: Sequence[tuple[int, int]]) -> Ref:
        """A run's array, of which kernels read and write these bytes; who reads it later in the call reads the same."""
        if not spans:
            return Ref(0, address=0, on_device=True)
        found = self._some(array, "updated", number, spans[0][0], spans[-1][1])
        found.spans += spans
        return found

    def _some(self, array: npt.NDArray[Any], kind: str, number: int, begin: int, end: int) -> Ref:
        source = self._renumbered(Source(number))
        assert source is not None, "it was given"
        found = self._on_device(array, Source(number))
        if found is None:
            if kind == "inputs" and ("updated", source.number) in self._shared:
                kind = "updated"
            found = self._shared.get((kind, source.number))
            if found is None:
                found = self._shared[kind, source.number] = Ref(0, source=source, pinned=is_pinned(array))
                self.kinds[kind].append(found)
            # Loads of vectors want offsets in messages and addresses to be alike.
            found.cover(begin // _VECTOR * _VECTOR, end)
        return found

    def _add(
        self, kind: str, nbytes: int, array: npt.NDArray[Any] | None, source: Source | None = None
    ) -> Ref:
        ref = Ref(int(nbytes), array, source=self._renumbered(source))
        self.kinds[kind].append(ref)
        return ref

    def _renumbered(self, source: Source | None) -> Source | None:
        if source is None or not self._arrays:
            return source
        return Source(self._arrays[source.number], source.rows)

    def _on_device(self, array: Any, source: Source | None) -> Ref | None:
        interface = getattr(array, "__cuda_array_interface__", None)
        if interface is None:
            return None
        source = self._renumbered(source)
        return Ref(array.nbytes, None, int(interface["data"][0]), source, on_device=True)

    def addresses(self, refs: Sequence[Parameter]) -> Ref:
        """An array of the addresses of other memory."""
        ref = self._add("inputs", 8 * len(refs), None)
        self.lists.append((ref, refs))
        return ref

    # -- kernels --------------------------------------------------------------------------------------------------

    def launch(
        self,
        source: str,
        name: str,
        blocks: int,
        *parameters: Parameter,
        threads: int = THREADS,
        defines: Mapping[str, object] | None = None,
    ) -> None:
        """Start ``blocks`` blocks, if any, with a struct of eight-byte parameters: addresses, integers, doubles."""
        if blocks > 0:
            function = self.driver.function(source, name, defines or {})
            if self._numbers:
                parameters = tuple(self._shifted(each) for each in parameters)
            self.launches.append(Launch(function, int(blocks), threads, parameters))

    def launch_tiles(
        self, source: str, name: str, count: int, *parameters: Parameter, defines: Mapping[str, object]
    ) -> None:
        """Start as many blocks as the device runs at a time, if there are so many tiles, each of which takes some."""
        if count > 0:
            most = self.driver.resident(self.driver.function(source, name, defines), THREADS)
            self.launch(source, name, min(count, most), *parameters, defines=defines)

    def _shifted(self, parameter: Parameter) -> Parameter:
        if isinstance(parameter, Integer | Real):
            return type(parameter)(parameter.place + self._numbers)
        return parameter

    def layout(self) -> Layout:
        """Where all of it lies."""
        return Layout(self.driver, self.kinds, self.launches, self.lists)

    def run(self) -> None:
        """Do all of it, and wait until results are in their arrays."""
        if not self.launches:
            # Nothing ran: what should begin as zero is zero.
            for ref in self.kinds["zeroed"]:
                assert ref.array is not None
                ref.array[...] = 0
            return
        layout = self.layout()
        staged = self.driver.pinned(layout.staged_bytes)
        layout.write(staged)
        layout.run(staged)


def tiles(counts: Sizes) -> Sizes:
    """First tile of every row, and the number of all, for so many tiles per row."""
    return np.concatenate(([0], np.cumsum(counts)), dtype=np.int64)


def places_of(counts: Sizes) -> npt.NDArray[np.uint32]:
    """The row of every block, and its tile within the row, for so many tiles per row."""
    begins = tiles(counts)
    found = np.empty((int(begins[-1]), 2), np.uint32)
    found[:, 0] = np.repeat(np.arange(len(counts)), counts)
    found[:, 1] = np.arange(len(found)) - np.repeat(begins[:-1], counts)
    return found


def groups(table: SegmentTable) -> Sizes:
    """Tiles per row for kernels in which a thread takes GROUP elements."""
    counts: Sizes = -(-table["length"] // (THREADS * GROUP))
    return counts
