"""The memory of a kernel call, and its runs.

All of it but the parameters is one piece of the device's memory::

    [parameters]   go with the launches
    [inputs | zeroed workspace | updated | zeroed results]   copied up
                           [updated | zeroed results | results]   copied back
                                           [large zeroed workspace | workspace]   stays there
                                                                  [messages]   copied one by one

There is one copy up, and one back, through a run's pinned memory. A message that lies in pinned memory itself, and is
large enough to be worth a copy of its own, is copied directly. Addresses, sizes and constant inputs are laid out once,
in an image. A run copies the image, adds the address of its memory to all words that are addresses in it, and fills in
its own arrays and numbers. Addresses count from the beginning of the image: the device's memory begins after the
parameters.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from gradcomp.kernels.cuda.driver import Block, Bytes, Driver
from gradcomp.kernels.cuda.mirrors import DeviceMirror

#: Kinds of memory, in their order. The zeros of "zeroed_workspace" and "zeroed" are copied up.
KINDS = (
    *("inputs", "zeroed_workspace", "updated", "zeroed", "results"),
    *("large_zeroed_workspace", "workspace", "messages"),
)

_ALIGNMENT = 256
_WORD = 0xFFFFFFFFFFFFFFFF
_LEAST_STAGED = 1 << 16
_LARGE = 1 << 13  # bytes from which on an array that every run brings is left out of the image's copy
# Bytes that the CPU copies in about the time that it takes to start a copy by the device.
_LEAST_ALONE = 1 << 16


@dataclass(frozen=True, eq=False)
class Source:
    """One of a run's arrays, a table or a vector, or some of its rows."""

    number: int
    rows: npt.NDArray[np.int64] | None = None


@dataclass(eq=False)
class Ref:
    """Memory of a call.

    ``array``: where it is copied from, or to. ``address``: within the call's memory, or that of an array that lies on
    the device. ``source``: where a run finds the array, of which the memory holds ``nbytes`` from ``first`` on;
    kernels are given the address of the whole array. ``spans``: the bytes of the array that are copied back, if not
    all. ``pinned``: whether the array is in pinned memory.
    """

    nbytes: int
    array: npt.NDArray[Any] | None = None
    address: int = -1
    source: Source | None = None
    on_device: bool = False
    first: int = 0
    spans: list[tuple[int, int]] = field(default_factory=list)
    pinned: bool = False

    def part(self, offset: int) -> Part:
        """Returns the address of a byte in it."""
        return Part(self, offset)

    def cover(self, begin: int, end: int) -> None:
        """Extends the memory to include these bytes of the array."""
        if self.nbytes:
            begin, end = min(begin, self.first), max(end, self.first + self.nbytes)
        self.first, self.nbytes = begin, end - begin

    def copies(self) -> list[tuple[int, int]]:
        """Returns the fewest spans that separate copies of this array would take."""
        joined: list[tuple[int, int]] = []
        for begin, end in sorted(self.spans) or [(self.first, self.first + self.nbytes)]:
            if joined and joined[-1][1] == begin:
                joined[-1] = joined[-1][0], end
            else:
                joined.append((begin, end))
        return joined

    @property
    def is_alone(self) -> bool:
        """Returns whether the array is copied by itself."""
        copies = self.copies() if self.pinned else []
        return bool(copies) and sum(end - begin for begin, end in copies) >= _LEAST_ALONE * len(copies)


@dataclass(frozen=True, eq=False)
class Part:
    """A byte of a call's memory."""

    whole: Ref
    offset: int


@dataclass(frozen=True)
class Integer:
    """An integer that every run brings, by its place among the run's numbers."""

    place: int


@dataclass(frozen=True)
class Real:
    """A double that every run brings, by its place among the run's numbers."""

    place: int


Parameter = Ref | Part | Integer | Real | int | float


@dataclass(frozen=True, eq=False)
class Launch:
    """A kernel, its grid, and its struct of parameters."""

    function: Any
    blocks: int
    threads: int
    parameters: tuple[Parameter, ...]


class Staging:
    """Pinned memory of the host that calls on all threads share."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._free: list[Bytes] = []
        self._left: list[
            tuple[Any, Bytes, Any]
        ] = []  # event, memory that is in use until it completes, and other objects to keep until then

    def take(self, nbytes: int) -> Bytes:
        """Returns at least ``nbytes`` for exclusive use until :meth:`put_back`; memory that is put back is reused."""
        if self._left:
            self._look_after()
        found = self._free.pop() if self._free else None
        if found is None or len(found) < nbytes:
            found = self._driver.pinned(1 << (max(nbytes, _LEAST_STAGED) - 1).bit_length())
        return found

    def put_back(self, staged: Bytes) -> None:
        """Takes back memory that no copy uses any more."""
        self._free.append(staged)

    def leave(self, event: Any, staged: Bytes, keep: Any) -> None:
        """Takes over memory, and objects to keep, that the device uses until an event for which no thread waits."""
        self._left.append((event, staged, keep))

    def _look_after(self) -> None:
        for _ in range(len(self._left)):
            with suppress(IndexError):  # another thread may have emptied the list
                left = self._left.pop(0)
                if self._driver.reached(left[0]):
                    self.put_back(left[1])
                else:
                    self._left.append(left)


@dataclass(frozen=True, eq=False)
class Started:
    """A run in progress: its memory on the device, the host memory of its results, and the event at its end."""

    block: Block
    found: Bytes
    event: Any = None


class Layout:
    """The memory of one call, and the places that a run fills in."""

    def __init__(
        self,
        driver: Driver,
        kinds: Mapping[str, Sequence[Ref]],
        launches: Sequence[Launch],
        lists: Sequence[tuple[Ref, Sequence[Parameter]]],
    ) -> None:
        self._driver = driver
        alone = [ref for kind in ("inputs", "results") for ref in kinds[kind] if ref.is_alone]
        self._kinds = kinds = {kind: [ref for ref in kinds[kind] if ref not in alone] for kind in KINDS}
        kinds["messages"] = alone
        self._own: list[int] = []  # words that hold addresses in the call's memory
        self._foreign: list[tuple[int, int, int]] = []  # words that hold addresses in arrays on the device
        self._numbers: list[tuple[int, int]] = []  # words, and the places of the numbers in them
        self._formats: dict[int, str] = {}
        words: list[int] = []
        self._grids = []
        for launch in launches:
            begin = 8 * len(words)
            words += [0] * len(launch.parameters)
            span = slice(begin, 8 * len(words))
            self._grids.append((launch.function, launch.blocks, launch.threads, span))
        words += [0] * (-len(words) % (_ALIGNMENT // 8))
        self._begin = end = 8 * len(words)
        ends = {}
        for kind in KINDS:
            for ref in kinds[kind]:
                ref.address = end
                end += -(-ref.nbytes // _ALIGNMENT) * _ALIGNMENT
            ends[kind] = end
        self.nbytes = max(end - self._begin, 1)
        self._up_end = ends["zeroed"]
        self._down = ends["zeroed_workspace"], ends["results"]
        self._large = ends["results"], ends["large_zeroed_workspace"]
        for launch, (_, _, _, span) in zip(launches, self._grids, strict=True):
            for word, parameter in enumerate(launch.parameters, span.start // 8):
                words[word] = self._word(word, parameter)
        self._words = np.array(words, dtype=np.uint64)
        self._addresses = [
            (
                ref,
                np.array([self._word(ref.address // 8 + i, each) for i, each in enumerate(refs)], np.uint64),
            )
            for ref, refs in lists
        ]
        self._own_words = np.array(self._own, dtype=np.int64)
        self._number_words = np.array([word for word, _ in self._numbers], dtype=np.int64)
        self._number_places = np.array([place for _, place in self._numbers], dtype=np.int64)
        count = max(self._formats, default=-1) + 1
        # A number that no launch uses is packed too; as a double, which every number fits.
        self._pack = struct.Struct("".join(self._formats.get(i, "d") for i in range(count))).pack
        self._number_count = count
        self._brought = [
            (ref.address, ref.first, ref.nbytes, ref.source)
            for kind in ("inputs", "updated")
            for ref in kinds[kind]
            if ref.source is not None
        ]
        self._taken = [
            (ref, begin, end, ref.address - ref.first - self._down[0])
            for kind in ("updated", "zeroed", "results")
            for ref in kinds[kind]
            for begin, end in ref.spans or [(ref.first, ref.first + ref.nbytes)]
            if end > begin
        ]
        # Messages: the number of a run's array, begin and end in it, and the place in the call's memory. Only arrays
        # that are written have spans.
        self._sent_up, self._sent_down = (
            [
                (ref.source.number, begin, end, ref.address - ref.first + begin)
                for ref in alone
                if bool(ref.spans) is written and ref.source is not None
                for begin, end in ref.copies()
            ]
            for written in (False, True)
        )

    def _word(self, word: int, parameter: Parameter) -> int:
        """Returns the image's word for a parameter, and notes it if a run changes it."""
        ref, offset = (parameter.whole, parameter.offset) if isinstance(parameter, Part) else (parameter, 0)
        if isinstance(ref, Ref):
            if not ref.on_device:
                self._own.append(word)
            elif ref.source is not None:
                self._foreign.append((word, ref.source.number, offset))
            return (ref.address - ref.first + offset) & _WORD
        if isinstance(ref, Integer | Real):
            self._numbers.append((word, ref.place))
            self._formats[ref.place] = "d" if isinstance(ref, Real) else "Q"
            return 0
        if isinstance(ref, float | np.floating):
            return int.from_bytes(struct.pack("<d", ref), "little")
        return int(ref) & _WORD

    @property
    def image_bytes(self) -> int:
        """Returns the size of the part that is copied up, parameters included."""
        return self._up_end

    @property
    def staged_bytes(self) -> int:
        """Returns the bytes of pinned memory that a run takes."""
        return self._up_end + self._down[1] - self._down[0]

    def write(self, staged: Bytes) -> Bytes:
        """Writes the data that all runs share; returns the part of ``staged`` that it takes."""
        image = staged[: self._up_end]
        words = image.view(np.uint64)
        words[: len(self._words)] = self._words
        for ref, addresses in self._addresses:
            words[ref.address // 8 : ref.address // 8 + len(addresses)] = addresses
        for kind in ("inputs", "updated"):
            for ref in self._kinds[kind]:
                if ref.nbytes and ref.source is None and ref.array is not None:
                    image[ref.address : ref.address + ref.nbytes] = flat(ref.array)
        for kind in ("zeroed_workspace", "zeroed"):
            for ref in self._kinds[kind]:
                image[ref.address : ref.address + ref.nbytes] = 0
        return image

    def constant(self) -> list[tuple[int, int]]:
        """Returns the spans of the image that runs copy: all but large arrays that every run brings."""
        spans, begin = [], 0
        for at, _, nbytes, _ in sorted(self._brought, key=lambda brought: brought[0]):
            if nbytes >= _LARGE:
                spans.append((begin, at))
                begin = at + nbytes
        return [*spans, (begin, self._up_end)]

    def run(self, staged: Bytes, arrays: Sequence[Any] = (), numbers: Sequence[int | float] = ()) -> None:
        """Runs the call and waits until results are in their arrays; ``staged`` begins with a copy of the image."""
        started = self._issue(staged, arrays, numbers, marked=False)
        self._driver.synchronize()
        self.deliver(started, arrays)

    def start(self, staged: Bytes, arrays: Sequence[Any], numbers: Sequence[int | float]) -> Started:
        """Starts the call. After its event results are on the host, and :meth:`deliver` copies them to their arrays.

        ``staged`` begins with a copy of the image. It and the returned object must be kept until the event.
        """
        return self._issue(staged, arrays, numbers, marked=True)

    def deliver(self, started: Started, arrays: Sequence[Any]) -> None:
        """Copies the results of a completed run into their arrays."""
        found = started.found
        for ref, first, last, shift in self._taken:
            target = flat(ref.array if ref.source is None else arrays[ref.source.number])
            target[first:last] = found[first + shift : last + shift]

    def _issue(
        self, staged: Bytes, arrays: Sequence[Any], numbers: Sequence[int | float], *, marked: bool
    ) -> Started:
        driver = self._driver
        block = driver.allocate(self.nbytes)
        base = block.address - self._begin
        words = staged[: self._up_end].view(np.uint64)
        words[self._own_words] += np.uint64(base)
        for word, number, offset in self._foreign:
            words[word] = (address_of(arrays[number]) + offset) & _WORD
        if len(self._number_words):
            packed = np.frombuffer(self._pack(*numbers[: self._number_count]), dtype=np.uint64)
            words[self._number_words] = packed[self._number_places]
        for at, first, nbytes, source in self._brought:
            _bring(staged[at : at + nbytes], arrays[source.number], first, source.rows)
        try:
            if self._up_end > self._begin:
                self.upload(base + self._begin, staged[self._begin : self._up_end])
            for number, begin, end, at in self._sent_up:
                driver.upload(base + at, flat(arrays[number])[begin:end])
            begin, end = self._large
            if end > begin:
                driver.zero(base + begin, end - begin)
            for function, blocks, threads, span in self._grids:
                driver.launch(function, blocks, threads, staged[span])
            begin, end = self._down
            found = staged[self._up_end : self._up_end + end - begin]
            if end > begin:
                driver.download(found, base + begin)
            for number, begin, end, at in self._sent_down:
                driver.download(flat(arrays[number])[begin:end], base + at)
            event = driver.mark(driver.stream) if marked else None
        except BaseException:
            # Started work still uses memory, the caller's included, that might be reused after this error.
            with suppress(Exception):
                driver.synchronize()
            raise
        return Started(block, found, event)

    def upload(self, address: int, staged: Bytes) -> None:
        """Copies the image and the run's inputs to the beginning of the call's memory."""
        self._driver.upload(address, staged)

    def finalised(
        self, image: Bytes, arrays: Sequence[Any], numbers: Sequence[int | float], changing: Collection[int]
    ) -> Layout:
        """Returns this layout for runs with these arrays and numbers; only ``changing`` arrays' contents change.

        Everything else that a run fills in is written into the image.
        """
        words = image.view(np.uint64)
        for word, number, offset in self._foreign:
            words[word] = (address_of(arrays[number]) + offset) & _WORD
        if len(self._number_words):
            packed = np.frombuffer(self._pack(*numbers[: self._number_count]), dtype=np.uint64)
            words[self._number_words] = packed[self._number_places]
        made = copy(self)
        made._foreign, made._number_words, made._brought = [], self._number_words[:0], []
        for brought in self._brought:
            at, first, nbytes, source = brought
            if source.number in changing:
                made._brought.append(brought)
            else:
                _bring(image[at : at + nbytes], arrays[source.number], first, source.rows)
        return made

    def pieces(self) -> list[tuple[int, int]]:
        """Returns offset in the call's memory and size of all its parts, in order."""
        return [(ref.address - self._begin, ref.nbytes) for kind in KINDS for ref in self._kinds[kind]]

    def forget(self) -> None:
        """Drops the arrays of the run that it was made for; every other run brings its own."""
        self._addresses = []
        for refs in self._kinds.values():
            for ref in refs:
                ref.array = None


def flat(array: Any) -> Bytes:
    """Returns the bytes of a contiguous array."""
    if array.dtype == np.uint8 and array.ndim == 1:
        vector: Bytes = array
        return vector
    # A view of records takes NumPy three times as long as frombuffer.
    return np.frombuffer(array, np.uint8) if array.size else np.zeros(0, np.uint8)


def address_of(array: Any) -> int:
    """Returns the address of an array on the device."""
    if isinstance(array, DeviceMirror):
        return array.address
    return int(array.__cuda_array_interface__["data"][0])


def _bring(target: Bytes, array: Any, first: int, rows: npt.NDArray[np.int64] | None) -> None:
    if rows is None:
        target[:] = flat(array)[first : first + len(target)]
    elif len(rows):
        of_array = flat(array).reshape(len(array), -1)
        of_array.take(rows, 0, target.reshape(len(rows), -1), "clip")
