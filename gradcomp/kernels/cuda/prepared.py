"""Calls that recur in every step are recorded and checked once, then run with other arrays and numbers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from operator import is_
from typing import Any, NamedTuple

import numpy as np

from gradcomp.kernels.cuda.call import Call
from gradcomp.kernels.cuda.driver import Bytes, Driver
from gradcomp.kernels.cuda.layout import Layout, Source, Staging, Started
from gradcomp.kernels.cuda.mirrors import is_mirror, is_pinned
from gradcomp.kernels.replayed_calls import Routine
from gradcomp.kernels.segments import SEGMENT, SegmentTable

_FIXED_FROM = SEGMENT.fields["payload"][1] if SEGMENT.fields is not None else 0

#: The number of calls that are cached; the least recently run call is dropped first.
_MOST = 2048


class Prepared:
    """A call's layout, with the data that all its runs share."""

    def __init__(self, call: Call) -> None:
        self.layout: Layout | None = call.layout() if call.launches else None
        self._zeroed = [ref.source for ref in call.kinds["zeroed"] if ref.source is not None]
        self._image = np.zeros(0, dtype=np.uint8)
        self._constant: list[tuple[int, int]] = []
        self._nbytes = 0
        if self.layout is not None:
            self._nbytes = self.layout.staged_bytes
            self._constant = self.layout.constant()
            # Pages of the image that are never written take no memory.
            self._image = self.layout.write(np.zeros(self.layout.image_bytes, dtype=np.uint8))
            self.layout.forget()

    def staged(self, staging: Staging) -> Bytes:
        """Returns pinned memory with the data that all runs share, and gaps for the run's own."""
        taken = staging.take(self._nbytes)
        self._copy_to(taken)
        return taken

    def _copy_to(self, target: Bytes) -> None:
        for begin, end in self._constant:
            target[begin:end] = self._image[begin:end]

    def skip(self, arrays: Sequence[Any]) -> None:
        """Sets the results to zero that the call zeroes before its launches; for a call without launches."""
        for source in self._zeroed:
            arrays[source.number][...] = 0

    def run(self, staging: Staging, arrays: Sequence[Any], numbers: Sequence[int | float]) -> None:
        """Runs the call with these arrays and numbers; results are in their arrays when it returns."""
        if self.layout is None:
            self.skip(arrays)
            return
        staged = self.staged(staging)
        self.layout.run(staged, arrays, numbers)
        staging.put_back(staged)  # not after an error, as the device may still use it

    def finalised(
        self, arrays: Sequence[Any], numbers: Sequence[int | float], changing: Collection[int]
    ) -> Prepared:
        """Returns this call for runs with these arrays and numbers; only ``changing`` arrays' contents change."""
        made = copy(self)
        if self.layout is not None:
            made._image = np.zeros(len(self._image), dtype=np.uint8)
            self._copy_to(made._image)
            made.layout = self.layout.finalised(made._image, arrays, numbers, changing)
            made._constant = made.layout.constant()
        return made


class _Run(NamedTuple):
    """One run of a call. At its end the second array of ``found`` is ORed into the first; ``after`` is called then."""

    key: Hashable
    write_down: Callable[[Call], None]
    arrays: Sequence[Any]
    numbers: Sequence[int | float]
    found: tuple[Bytes, Bytes] | None
    after: Callable[[], None] | None


def _conclude(runs: Sequence[_Run]) -> None:
    """Merges the flags of runs whose results have arrived, and then calls their ``after``."""
    for run in runs:
        if run.found is not None:
            flags, found = run.found
            flags |= found
    for run in runs:
        if run.after is not None:
            run.after()


class Underway:
    """A prepared call in progress, as a :class:`gradcomp.kernels.replayed_calls.Pending`.

    If it is never finished, the memory that the device uses is kept until the device has completed the call.
    """

    __slots__ = ("_arrays", "_layout", "_plans", "_reached", "_runs", "_staged", "_started")

    def __init__(self, plans: Plans) -> None:
        self._plans = plans
        self._runs: list[_Run] = []
        self._started: Started | None = None
        self._reached = False

    def start(self, prepared: Prepared, arrays: Sequence[Any], numbers: Sequence[int | float]) -> None:
        """Starts the call of the runs that have been added."""
        if self._plans.is_rehearsal:
            return
        self._arrays = arrays
        if prepared.layout is None:
            prepared.skip(arrays)
            _conclude(self._runs)
            return
        self._layout, self._staged = prepared.layout, prepared.staged(self._plans.staging)
        # After an error the staged memory is not put back, as the device may still use it.
        self._started = prepared.layout.start(self._staged, arrays, numbers)

    def done(self) -> bool:
        if self._started is not None and not self._reached:
            self._reached = self._plans.driver.reached(self._started.event)
            return self._reached
        return True

    def finish(self) -> None:
        started = self._started
        if started is None:
            return
        if not self.done():
            self._plans.driver.synchronize()
        self._started = None
        self._layout.deliver(started, self._arrays)
        self._plans.staging.put_back(self._staged)
        _conclude(self._runs)

    def __del__(self) -> None:
        started = self._started
        if started is not None:
            self._plans.staging.leave(started.event, self._staged, (started, self._arrays))


class Together(Underway):
    """Collects the runs of its thread into one call, which starts at the block's end; see :meth:`Plans.together`."""

    __slots__ = ("_asked", "_given", "_hits", "_routine")

    def __init__(self, plans: Plans, routine: Routine | None) -> None:
        super().__init__(plans)
        self._routine = routine
        self._asked: Any = None
        self._given: list[Any] = []  # for each run, the token and arguments of its request
        self._hits = 0

    def __enter__(self) -> Together:
        self._plans.thread.together = self
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._plans.thread.together = None
        if kind is None and self._runs:
            self.start(*self._prepare())

    def repeat(
        self, token: Hashable, given: Sequence[Any], numbers: Sequence[int | float], flags: Bytes
    ) -> bool:
        """Adds the run at this position of the last call, if token and arguments are equal; returns whether it did."""
        routine = self._routine
        if routine is None:
            return False
        place = len(self._runs)
        if place < len(routine.runs):
            asked, run = routine.runs[place]
            if (
                asked is not None
                and asked[0] == token
                and len(given) == len(asked[1])
                and all(map(is_, given, asked[1]))
            ):
                found = flags, run.found[1]
                self._runs.append(_Run(run.key, run.write_down, run.arrays, numbers, found, run.after))
                self._given.append(asked)
                self._hits += 1
                return True
        self._asked = token, given
        return False

    def add(self, run: _Run) -> None:
        """Adds a run to the call."""
        self._runs.append(run)
        self._given.append(self._asked)
        self._asked = None

    def _prepare(self) -> tuple[Prepared, Sequence[Any], Sequence[int | float]]:
        """Returns all runs as one call, and its arrays and numbers."""
        routine, runs = self._routine, self._runs
        if routine is None:
            return self._plans.prepare(runs)
        if self._hits == len(runs) == len(routine.runs):
            numbers = [number for run in runs for number in run.numbers]
            return routine.prepared, routine.arrays, numbers
        found = self._plans.prepare(runs)
        routine.prepared, routine.arrays, _ = found
        routine.runs = list(zip(self._given, runs, strict=True))
        return found


class Plans:
    """The prepared calls of a device, by their keys."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.staging = Staging(driver)
        #: ``together``: collects this thread's runs. ``is_rehearsal``: see :meth:`rehearsing`.
        self.thread = threading.local()
        self._kept: dict[Hashable, Prepared] = {}  # in the order of their last runs

    def run(
        self,
        key: Hashable,
        write_down: Callable[[Call], None],
        arrays: Sequence[Any],
        numbers: Sequence[int | float] = (),
        found: tuple[Bytes, Bytes] | None = None,
        after: Callable[[], None] | None = None,
    ) -> None:
        """Runs the call of this key; if the key is new, ``write_down`` first records the call and checks it.

        ``key`` contains everything that the call depends on, except ``numbers`` and the contents of ``arrays``.
        ``found`` has flags and one of the arrays, which is ORed into the flags at the end. ``after`` checks the results
        and raises an error for faulty ones. Outside of :meth:`together`, the results are available on return.
        """
        together: Together | None = getattr(self.thread, "together", None)
        run = _Run(key, write_down, arrays, numbers, found, after)
        if together is not None:
            together.add(run)
            return
        prepared, own, numbers = self.prepare([run])
        if not self.is_rehearsal:
            prepared.run(self.staging, own, numbers)
            _conclude([run])

    @property
    def is_rehearsal(self) -> bool:
        """Returns whether this thread's runs are only recorded."""
        return getattr(self.thread, "is_rehearsal", False)

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Records this thread's runs inside the block and loads their kernels, but runs nothing."""
        self.thread.is_rehearsal = True
        try:
            yield
        finally:
            self.thread.is_rehearsal = False

    def repeats(
        self, token: Hashable, given: Sequence[Any], numbers: Sequence[int | float], flags: Bytes
    ) -> bool:
        """Adds a run that the routine in progress has recorded, and returns True; returns False if it has not.

        A run is the recorded one if ``token`` is equal and the ``given`` arguments are identical. Its results are
        merged with ``flags``.
        """
        together: Together | None = getattr(self.thread, "together", None)
        return together is not None and together.repeat(token, given, numbers, flags)

    def together(self, routine: Routine | None = None) -> AbstractContextManager[Together]:
        """Collects this thread's runs into one call, which starts at the block's end.

        The results are available once the call is finished. Therefore no run may read what another run writes on the
        host, and no array that a run reads may change inside the block. ``routine`` stores the call.
        """
        outer: Together | None = getattr(self.thread, "together", None)
        return Together(self, routine) if outer is None else nullcontext(outer)

    def finalise(self, routine: Routine, changing: Sequence[Any]) -> None:
        """Fixes a routine for runs in which only contents of ``changing`` arrays, and of views of them, change."""
        arrays, runs = routine.arrays, [run for _, run in routine.runs]
        held = [each for each in changing if isinstance(each, np.ndarray)]
        chosen = {
            number
            for number, array in enumerate(arrays)
            if isinstance(array, np.ndarray) and any(np.may_share_memory(array, each) for each in held)
        }
        numbers = [number for run in runs for number in run.numbers]
        routine.prepared = routine.prepared.finalised(arrays, numbers, chosen)
        routine.runs = [(None, run) for run in runs if run.found is not None or run.after is not None]

    def start_again(self, routine: Routine) -> Underway:
        """Starts all runs of a finalised routine."""
        found = Underway(self)
        found._runs = [run for _, run in routine.runs]
        found.start(routine.prepared, routine.arrays, ())
        return found

    def prepare(self, runs: Sequence[_Run]) -> tuple[Prepared, Sequence[Any], Sequence[int | float]]:
        """Returns the runs as one call, and its arrays and numbers."""
        arrays: list[Any] = []
        numbers: list[int | float] = []
        places: dict[int, int] = {}  # an array that several runs use is listed once
        parts: list[Any] = []
        for run in runs:
            own = []
            for array in run.arrays:
                place = places.get(id(array))
                if place is None:
                    place = places[id(array)] = len(arrays)
                    arrays.append(array)
                own.append(place)
            parts += run.key, tuple(own), len(numbers)
            numbers += run.numbers
        key = tuple(parts)
        prepared = self._kept.get(key)
        if prepared is None:
            call = Call(self.driver)
            for number, run in enumerate(runs):
                call.renumber(parts[3 * number + 1], parts[3 * number + 2])
                run.write_down(call)
            prepared = Prepared(call)
            while len(self._kept) >= _MOST:
                self._kept.pop(next(iter(self._kept)), None)
            self._kept[key] = prepared
        elif len(self._kept) > _MOST // 2:
            # With fewer calls none is dropped soon, and their order is irrelevant.
            self._kept[key] = self._kept.pop(key, prepared)
        return prepared, arrays, numbers


class Kernels:
    """The base class of a device's kernels, whose calls ``plans`` prepares and caches."""

    def __init__(self, plans: Plans) -> None:
        self._plans = plans


def fixed_columns(table: SegmentTable) -> bytes:
    """Returns the columns of a table that do not change from step to step: all but the addresses."""
    if not len(table):
        return b""
    return np.frombuffer(table, np.uint8).reshape(len(table), -1)[:, _FIXED_FROM:].tobytes()


def place_of(array: Any) -> tuple[int, str]:
    """Returns the size of an array, and the kind of memory that it lies in."""
    if type(array) is np.ndarray:
        return len(array), "host"
    if is_mirror(array) or hasattr(array, "__cuda_array_interface__"):
        return len(array), "device"
    return len(array), "pinned" if is_pinned(array) else "host"


def source_of(number: int, members: Any, rows: int) -> Source:
    """Returns the source for some rows of a run's array, or for all of them."""
    return Source(number, rows=None if len(members) == rows else members)
