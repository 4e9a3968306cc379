"""One kernel call: its inputs, launches and results; one copy each way and one wait, however many rows it has.

Large messages in pinned memory have copies of their own. Of arrays on the host only the parts that rows, lists or
factors cover are copied, after they have been checked.

A call is recorded first and runs at the end: arrays are registered, launches refer to them, and :meth:`run`
lays everything out in one piece of device memory (:mod:`gradcomp.kernels.cuda.layout`). A call that recurs in
every step is recorded once (:mod:`gradcomp.kernels.cuda.prepared`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gradcomp.kernels.cuda.driver import Driver
from gradcomp.kernels.cuda.layout import KINDS, Integer, Launch, Layout, Parameter, Real, Ref, Source
from gradcomp.kernels.cuda.mirrors import is_mirror, is_pinned
from gradcomp.kernels.reference_indices import check_aligned
from gradcomp.kernels.segments import SegmentTable, check_array

Sizes = npt.NDArray[np.int64]

#: Threads of a block in most kernels, and how many elements each takes.
THREADS = 256
GROUP = 8

_VECTOR = 16  # bytes
_SMALL = 1 << 16  # bytes of zeros that are copied up with all else


class Call:
    """A call that is being recorded; see the module. Arrays that are already on the device are used in place.

    ``source`` identifies an array of a prepared call, whose runs each bring another one of the same size. Where
    several calls become one, :meth:`renumber` gives the places of each call's arrays and numbers among the run's, and
    :meth:`part` does so for the parts of one of them.
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
        """Makes array i of the following call number ``arrays[i]`` of a run's, and number i number ``numbers + i``."""
        self._arrays, self._numbers = self._whole = arrays, numbers

    def part(self, arrays: Sequence[int], numbers: int) -> None:
        """Renumbers the arrays and numbers of a part, within those that were renumbered last."""
        of, first = self._whole
        self._arrays = [of[i] for i in arrays] if of else arrays
        self._numbers = first + numbers

    # -- memory ---------------------------------------------------------------------------------------------------

    def give(self, array: npt.NDArray[Any], source: Source | None = None) -> Ref:
        """Registers an array that kernels read."""
        found = self._on_device(array, source)
        return found or self._add("inputs", array.nbytes, np.ascontiguousarray(array), source)

    def update(self, array: npt.NDArray[Any], source: Source | None = None) -> Ref:
        """Registers a contiguous array that kernels read and write."""
        return self._on_device(array, source) or self._add("updated", array.nbytes, array, source)

    def result(self, array: npt.NDArray[Any], source: Source | None = None, *, zero: bool = False) -> Ref:
        """Registers a contiguous array that kernels write, all of it unless it begins as ``zero``."""
        found = self._on_device(array, source)
        if found is not None:
            if zero and array.nbytes:
                assert source is None, "zeros on the device belong to one run"
                self.driver.zero(found.address, array.nbytes)
            return found
        return self._add("zeroed" if zero else "results", array.nbytes, array, source)

    def workspace(self, nbytes: int, *, zero: bool = False) -> Ref:
        """Reserves memory that only the call's kernels use."""
        kind = (
            "workspace" if not zero else "zeroed_workspace" if nbytes <= _SMALL else "large_zeroed_workspace"
        )
        return self._add(kind, nbytes, None)

    def read(self, array: npt.NDArray[Any], number: int, begin: int, end: int) -> Ref:
        """Registers the bytes of a run's array that kernels read; bytes on the host are copied once for all readers."""
        return self._some(array, "inputs", number, begin, end)

    def write(self, array: npt.NDArray[Any], number: int, spans: Sequence[tuple[int, int]]) -> Ref:
        """Registers the bytes of a run's array that kernels write; nothing else in it changes."""
        if not spans:
            return Ref(0, address=0, on_device=True)
        found = self._some(array, "results", number, spans[0][0], spans[-1][1])
        found.spans += spans
        return found

    def change(self, array: npt.NDArray[Any], number: int, spans: Sequence[tuple[int, int]]) -> Ref:
        """Registers the bytes of a run's array that kernels change; later reads in the call see the changes."""
        if not spans:
            return Ref(0, address=0, on_device=True)
        found = self._some(array, "updated", number, spans[0][0], spans[-1][1])
        found.spans += spans
        return found

    def _some(self, array: npt.NDArray[Any], kind: str, number: int, begin: int, end: int) -> Ref:
        source = self._renumbered(Source(number))
        assert source is not None, "renumbering keeps the source"
        found = self._on_device(array, Source(number))
        if found is None:
            if kind == "inputs" and ("updated", source.number) in self._shared:
                kind = "updated"
            found = self._shared.get((kind, source.number))
            if found is None:
                found = self._shared[kind, source.number] = Ref(0, source=source, pinned=is_pinned(array))
                self.kinds[kind].append(found)
            # Vector loads need addresses that are aligned as the offsets in the message are.
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
        """Registers an array of the addresses of other memory."""
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
        """Launches ``blocks`` blocks, if any, with a struct of eight-byte parameters: addresses, integers, doubles."""
        if blocks > 0:
            function = self.driver.function(source, name, defines or {})
            if self._numbers:
                parameters = tuple(self._shifted(each) for each in parameters)
            self.launches.append(Launch(function, int(blocks), threads, parameters))

    def launch_tiles(
        self, source: str, name: str, count: int, *parameters: Parameter, defines: Mapping[str, object]
    ) -> None:
        """Launches one block per tile, but no more than the device runs at a time; each then takes several tiles."""
        if count > 0:
            most = self.driver.resident(self.driver.function(source, name, defines), THREADS)
            self.launch(source, name, min(count, most), *parameters, defines=defines)

    def _shifted(self, parameter: Parameter) -> Parameter:
        if isinstance(parameter, Integer | Real):
            return type(parameter)(parameter.place + self._numbers)
        return parameter

    def layout(self) -> Layout:
        """Returns the layout of the call's memory."""
        return Layout(self.driver, self.kinds, self.launches, self.lists)

    def run(self) -> None:
        """Runs the call, and waits until results are in their arrays."""
        if not self.launches:
            # No kernel writes these results, so they keep the zeros that they begin with.
            for ref in self.kinds["zeroed"]:
                assert ref.array is not None
                ref.array[...] = 0
            return
        layout = self.layout()
        staged = self.driver.pinned(layout.staged_bytes)
        layout.write(staged)
        layout.run(staged)


def tiles(counts: Sizes) -> Sizes:
    """Returns the first tile of every row, then the number of all tiles; row i has ``counts[i]`` tiles."""
    return np.concatenate(([0], np.cumsum(counts)), dtype=np.int64)


def places_of(counts: Sizes) -> npt.NDArray[np.uint32]:
    """Returns the row of every block, and its tile within the row; row i has ``counts[i]`` tiles."""
    begins = tiles(counts)
    found = np.empty((int(begins[-1]), 2), np.uint32)
    found[:, 0] = np.repeat(np.arange(len(counts)), counts)
    found[:, 1] = np.arange(len(found)) - np.repeat(begins[:-1], counts)
    return found


def groups(table: SegmentTable) -> Sizes:
    """Returns the tiles per row for kernels in which a thread takes GROUP elements."""
    counts: Sizes = -(-table["length"] // (THREADS * GROUP))
    return counts


def described(array: Any) -> Any:
    """Returns a device array as a NumPy array of its address, whose contents are not to be read; others unchanged."""
    interface = getattr(array, "__cuda_array_interface__", None)
    if interface is None:
        return array
    address, read_only = interface["data"]
    dtype = np.dtype(interface["typestr"])
    shape = tuple(interface["shape"])
    strides = interface.get("strides")
    memory = (ctypes.c_uint8 * (int(np.prod(shape)) * dtype.itemsize)).from_address(address or 1)
    view = np.ndarray(shape, dtype, buffer=memory)
    if strides is not None and tuple(strides) != view.strides:
        raise TypeError("arrays on a device must be contiguous")
    view.flags.writeable = not read_only
    return view


def check_flat(name: str, array: Any, dtype: Any, *, writable: bool = False) -> None:
    """Raises TypeError unless it is a contiguous, aligned vector of `dtype`, of the host or the device."""
    interface = getattr(array, "__cuda_array_interface__", None)
    if interface is None:
        check_array(name, array, dtype, writable=writable)
        check_aligned(**{name: array})
        return
    dtype = np.dtype(dtype)
    address, read_only = interface["data"]
    strides = interface.get("strides")
    if not (
        np.dtype(interface["typestr"]) == dtype
        and len(interface["shape"]) == 1
        and (strides is None or tuple(strides) == (dtype.itemsize,))
        and address % dtype.itemsize == 0
        and not (read_only and writable)
    ):
        raise TypeError(f"{name} must be a contiguous one-dimensional array of {dtype}")


def overlap(a: Any, b: Any) -> bool:
    """Returns whether two arrays may share memory; the host and devices have no addresses in common."""
    return overlap_any(a, (b,))


def overlap_any(a: Any, others: Sequence[Any]) -> bool:
    """Returns whether an array may share memory with one of the others."""
    begin, end = _bounds(a)
    return any(begin < other_end and other < end for other, other_end in map(_bounds, others))


def _bounds(array: Any) -> tuple[int, int]:
    if is_mirror(array):
        return array.address, array.address + array.nbytes
    interface = None if type(array) is np.ndarray else getattr(array, "__cuda_array_interface__", None)
    begin = int((array.__array_interface__ if interface is None else interface)["data"][0])
    return begin, begin + array.nbytes


def ends(begins: Sizes, sizes: Sizes) -> tuple[int, int]:
    """Returns the beginning of the first item and the end of the last one."""
    begins, sizes = begins[sizes > 0], sizes[sizes > 0]
    return (int(begins.min()), int((begins + sizes).max())) if len(sizes) else (0, 0)


def spans(begins: Sizes, sizes: Sizes) -> list[tuple[int, int]]:
    """Returns begin and end of rows, ascending; adjacent rows are joined."""
    begins, sizes = begins[sizes > 0], sizes[sizes > 0]
    if not len(begins):
        return []
    order = np.argsort(begins, kind="stable")
    begins, behind = begins[order], (begins + sizes)[order]
    first = np.flatnonzero(np.append(True, begins[1:] != behind[:-1]))
    last = np.append(first[1:], len(begins)) - 1
    return list(zip(begins[first].tolist(), behind[last].tolist(), strict=True))


def to_read(call: Call, array: Any, number: int, begins: Sizes, sizes: Sizes) -> Parameter:
    """Registers lists of a run's array that are read; of the host's array only the part that they cover is copied."""
    first, end = ends(begins, sizes)
    return call.read(array, number, first * array.itemsize, end * array.itemsize) if end > first else 0


def to_write(
    call: Call, array: Any, number: int, begins: Sizes, sizes: Sizes, *, all_of_it: bool = True
) -> Parameter:
    """Registers lists of a run's array that are written; unless ``all_of_it`` is, they are copied up as well."""
    first, end = ends(begins, sizes)
    if end == first:
        return 0
    if not all_of_it:
        return call.change(array, number, [(first * array.itemsize, end * array.itemsize)])
    return call.write(array, number, spans(begins * array.itemsize, sizes * array.itemsize))
