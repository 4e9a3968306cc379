"""Calls that come again in every step: written down and checked once, then run with other arrays and numbers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradcomp.kernels.cuda.call import Call
from gradcomp.kernels.cuda.driver import Bytes, Driver
from gradcomp.kernels.cuda.layout import Layout, Source, Staging
from gradcomp.kernels.cuda.twins import is_twin
from gradcomp.kernels.segments import SEGMENT, SegmentTable

_FIXED_FROM = SEGMENT.fields["payload"][1] if SEGMENT.fields is not None else 0

#: Calls that are kept, those that ran last.
_MOST = 2048


class Prepared:
    """A call's layout, with all that its runs have in common."""

    def __init__(self, call: Call) -> None:
        self._layout: Layout | None = call.layout() if call.launches else None
        self._zeroed = [ref.source for ref in call.kinds["zeroed"] if ref.source is not None]
        self._image = np.zeros(0, dtype=np.uint8)
        if self._layout is not None:
            staged = np.zeros(self._layout.staged_bytes, dtype=np.uint8)
            self._image = self._layout.write(staged).copy()
            self._layout.forget()

    def run(self, staging: Staging, arrays: Sequence[Any], numbers: Sequence[int | float]) -> None:
        """Once more, with a run's arrays and numbers."""
        if self._layout is None:
            for source in self._zeroed:
                arrays[source.number][...] = 0
            return
        staged = staging.take(self._layout.staged_bytes)
        staged[: len(self._image)] = self._image
        self._layout.run(staged, arrays, numbers)
        staging.put_back(staged)  # after an error nobody knows what still uses it


@dataclass(frozen=True, eq=False)
class _Run:
    """One run of a call. ``found``: flags, and what is added to them afterwards."""

    key: Hashable
    write_down: Callable[[Call], None]
    arrays: Sequence[Any]
    numbers: Sequence[int | float]
    found: tuple[Bytes, Bytes] | None


class Plans:
    """The prepared calls of a device, by what decides about them."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._staging = Staging(driver)
        self._kept: dict[Hashable, Prepared] = {}  # what ran last comes last
        self._thread = threading.local()

    def run(
        self,
        key: Hashable,
        write_down: Callable[[Call], None],
        arrays: Sequence[Any],
        numbers: Sequence[int | float] = (),
        found: tuple[Bytes, Bytes] | None = None,
    ) -> None:
        """Run the call of this key. ``write_down`` is asked for it, and checks it, when the key is new.

        ``key``: everything that the call depends on, but for the contents of ``arrays`` and ``numbers``. ``found``:
        flags, and one of the arrays that they are merged with in the end.
        """
        run = _Run(key, write_down, arrays, numbers, found)
        waiting: list[_Run] | None = getattr(self._thread, "waiting", None)
        if waiting is None:
            self._run([run])
        else:
            waiting.append(run)

    @contextmanager
    def together(self) -> Iterator[None]:
        """What this thread runs meanwhile becomes one call, at the end: until then no result is there.

        So neither may a run read what another one leaves on the host, nor may an array that it reads change.
        """
        if getattr(self._thread, "waiting", None) is not None:
            yield
            return
        waiting: list[_Run] = []
        self._thread.waiting = waiting
        try:
            yield
        finally:
            self._thread.waiting = None
        if waiting:
            self._run(waiting)

    def _run(self, runs: Sequence[_Run]) -> None:
        arrays: list[Any] = []
        numbers: list[int | float] = []
        places: dict[int, int] = {}  # an array that several runs use is one
        shifts = []
        for run in runs:
            own = []
            for array in run.arrays:
                place = places.setdefault(id(array), len(arrays))
                own.append(place)
                if place == len(arrays):
                    arrays.append(array)
            shifts.append((tuple(own), len(numbers)))
            numbers += run.numbers
        key = (*(run.key for run in runs), *shifts)
        prepared = self._kept.pop(key, None)
        if prepared is None:
            call = Call(self._driver)
            for run, shift in zip(runs, shifts, strict=True):
                call.renumber(*shift)
                run.write_down(call)
            prepared = Prepared(call)
            while len(self._kept) >= _MOST:
                self._kept.pop(next(iter(self._kept)), None)
        self._kept[key] = prepared
        prepared.run(self._staging, arrays, numbers)
        for run in runs:
            if run.found is not None:
                flags, found = run.found
                flags |= found


def fixed_columns(table: SegmentTable) -> bytes:
    """What does not change from step to step of a table's rows: all but the addresses."""
    rows = table.view(np.uint8).reshape(len(table), SEGMENT.itemsize)
    return rows[:, _FIXED_FROM:].tobytes()


def place_of(array: Any) -> tuple[int, bool]:
    """Size of an array, and whether it lies on a device."""
    on_device = type(array) is not np.ndarray and (
        is_twin(array) or hasattr(array, "__cuda_array_interface__")
    )
    return len(array), on_device


def source_of(number: int, members: Any, rows: int) -> Source:
    """Some rows of a run's array, or all of them."""
    return Source(number, rows=None if len(members) == rows else members)
