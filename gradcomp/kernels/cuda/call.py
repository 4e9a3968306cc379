"""One kernel call: what goes up, what runs, what comes back; one copy each way and one wait, however many rows.

A call is written down first and runs at the end: arrays are given and asked for, launches name them, and :meth:`run`
lays everything out in one piece of device memory::

    [parameters | inputs | updated]  copied up
                          [updated | zeroed results | results]  copied back
                                                             [zeroed room | room]  stays there
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from gradcomp.kernels.cuda.driver import Bytes, Driver
from gradcomp.kernels.segments import SegmentTable

Sizes = npt.NDArray[np.int64]

#: Threads of a block in most kernels, and how many elements each takes.
THREADS = 256
GROUP = 8

_ALIGNMENT = 256


@dataclass(eq=False)
class Ref:
    """Memory of a call: an address once it runs."""

    nbytes: int
    array: npt.NDArray[Any] | None = None  # what it is copied from, or to
    address: int = -1

    def part(self, offset: int) -> _Part:
        """The address of a byte in it."""
        return _Part(self, offset)


@dataclass(frozen=True)
class _Part:
    whole: Ref
    offset: int


Parameter = Ref | _Part | int | float


@dataclass(eq=False)
class _Launch:
    function: Any
    blocks: int
    threads: int
    parameters: tuple[Parameter, ...]
    place: Ref = field(default_factory=lambda: Ref(0))


class Call:
    """See the module. Arrays that lie on the device already are used where they are."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._kinds: dict[str, list[Ref]] = {
            kind: [] for kind in ("inputs", "updated", "zeroed", "results", "zeroed_room", "room")
        }
        self._launches: list[_Launch] = []
        self._lists: list[tuple[Ref, Sequence[Ref]]] = []

    # -- memory ---------------------------------------------------------------------------------------------------

    def give(self, array: npt.NDArray[Any]) -> Ref:
        """An array that kernels read."""
        return self._on_device(array) or self._add("inputs", array.nbytes, np.ascontiguousarray(array))

    def update(self, array: npt.NDArray[Any]) -> Ref:
        """An array that kernels read and write; contiguous."""
        return self._on_device(array) or self._add("updated", array.nbytes, array)

    def result(self, array: npt.NDArray[Any], *, zero: bool = False) -> Ref:
        """An array that kernels write, all of it unless it begins as ``zero``; contiguous."""
        found = self._on_device(array)
        if found is not None:
            if zero and array.nbytes:
                self._driver.zero(found.address, array.nbytes)
            return found
        return self._add("zeroed" if zero else "results", array.nbytes, array)

    def room(self, nbytes: int, *, zero: bool = False) -> Ref:
        """Memory between kernels."""
        return self._add("zeroed_room" if zero else "room", nbytes, None)

    def _add(self, kind: str, nbytes: int, array: npt.NDArray[Any] | None) -> Ref:
        ref = Ref(int(nbytes), array)
        self._kinds[kind].append(ref)
        return ref

    def _on_device(self, array: Any) -> Ref | None:
        interface = getattr(array, "__cuda_array_interface__", None)
        return None if interface is None else Ref(array.nbytes, None, int(interface["data"][0]))

    def addresses(self, refs: Sequence[Ref]) -> Ref:
        """An array of the addresses of other memory."""
        ref = self._add("inputs", 8 * len(refs), None)
        self._lists.append((ref, refs))
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
            function = self._driver.function(source, name, defines or {})
            self._launches.append(_Launch(function, int(blocks), threads, parameters))

    def run(self) -> None:
        """Do all of it, and wait until results are in their arrays."""
        if not self._launches:
            # Nothing ran: what should begin as zero is zero.
            for ref in self._kinds["zeroed"]:
                assert ref.array is not None
                ref.array[...] = 0
            return
        for launch in self._launches:
            launch.place = Ref(8 * len(launch.parameters))
        ends = {}
        end = 0
        kinds = {"parameters": [launch.place for launch in self._launches], **self._kinds}
        for kind, refs in kinds.items():
            for ref in refs:
                ref.address = end  # relative to the block, for now
                end += -(-ref.nbytes // _ALIGNMENT) * _ALIGNMENT
            ends[kind] = end
        block = self._driver.allocate(max(end, 1))
        for refs in kinds.values():
            for ref in refs:
                ref.address += block.address
        for ref, members in self._lists:
            ref.array = np.array([member.address for member in members], dtype=np.uint64)
        try:
            staged = self._upload(block.address, ends["updated"])
            for first, last in (("updated", "zeroed"), ("results", "zeroed_room")):
                if ends[last] > ends[first]:
                    self._driver.zero(block.address + ends[first], ends[last] - ends[first])
            for launch in self._launches:
                self._driver.launch(launch.function, launch.blocks, launch.threads, launch.place.address)
            self._download(block.address, ends["inputs"], ends["results"])
        except BaseException:
            # What has been started still uses memory that others could be given, the caller's too.
            with suppress(Exception):
                self._driver.synchronize()
            raise
        del block, staged  # not before the wait

    def _upload(self, base: int, size: int) -> Bytes:
        staged = self._driver.pinned(size)
        for launch in self._launches:
            at = launch.place.address - base
            staged[at : at + launch.place.nbytes] = _packed(launch.parameters)
        for ref in (*self._kinds["inputs"], *self._kinds["updated"]):
            if ref.nbytes:
                at = ref.address - base
                staged[at : at + ref.nbytes] = _flat(ref)
        self._driver.upload(base, staged)
        return staged

    def _download(self, base: int, begin: int, end: int) -> None:
        if end == begin:
            self._driver.synchronize()
            return
        staged = self._driver.pinned(end - begin)
        self._driver.download(staged, base + begin)
        self._driver.synchronize()
        for ref in (*self._kinds["updated"], *self._kinds["zeroed"], *self._kinds["results"]):
            if ref.nbytes:
                at = ref.address - base - begin
                _flat(ref)[:] = staged[at : at + ref.nbytes]


def tiles(counts: Sizes) -> Sizes:
    """First tile of every row, and the number of all, for so many tiles per row."""
    return np.concatenate(([0], np.cumsum(counts)), dtype=np.int64)


def groups(table: SegmentTable) -> Sizes:
    """Tiles per row for kernels in which a thread takes GROUP elements."""
    counts: Sizes = -(-table["length"] // (THREADS * GROUP))
    return counts


def _packed(parameters: Sequence[Parameter]) -> npt.NDArray[np.uint8]:
    words = np.empty(len(parameters), dtype=np.uint64)
    for i, value in enumerate(parameters):
        if isinstance(value, (float, np.floating)):
            words[i : i + 1] = np.array([value], dtype=np.float64).view(np.uint64)
        elif isinstance(value, Ref):
            words[i] = value.address
        elif isinstance(value, _Part):
            words[i] = value.whole.address + value.offset
        else:
            words[i] = int(value) & 0xFFFFFFFFFFFFFFFF
    return words.view(np.uint8)


def _flat(ref: Ref) -> npt.NDArray[np.uint8]:
    assert ref.array is not None, "memory that is copied has an array"
    return ref.array.reshape(-1).view(np.uint8)
