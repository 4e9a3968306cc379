"""Kernel calls that recur in every step over the same arrays, which a device keeps as one prepared call."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import is_
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from gradcomp.kernels.devices import Device

_thread = threading.local()


class Pending(Protocol):
    """A call in progress. Its arrays must not change until it is finished."""

    def done(self) -> bool:
        """Returns, without blocking, whether :meth:`finish` would not wait; DeviceError if the device has failed."""
        ...

    def finish(self) -> None:
        """Puts the results into the caller's arrays, after waiting for the device if necessary. Call it once."""
        ...


class _Done:
    """A call of the host: complete when it returns."""

    def done(self) -> bool:
        return True

    def finish(self) -> None:
        return


DONE: Pending = _Done()


@dataclass(frozen=True, eq=False)
class _Part:
    """Some calls of a routine; see :func:`run`."""

    key: Hashable
    arrays: Sequence[Any]
    work: Callable[[], None]
    after: Callable[[], None] | None


class Routine:
    """Successive kernel calls over arrays that stay the same from step to step; a device keeps them as one call.

    From one run to the next only the contents of the arrays change; in tables only the columns of addresses change. A
    routine is used in one of two ways. ``device.kernels.together`` runs its block every time, with new numbers; the
    device only skips the checks that it has made before. :class:`Phase` takes parts whose keys tell whether anything is
    new; if nothing is, it runs the kept call without running the parts. On the host the kernels run one by one, every
    time.
    """

    __slots__ = ("arrays", "prepared", "runs")

    def __init__(self) -> None:
        # The device keeps the call, its arrays, and the runs that the call was made of.
        self.prepared: Any = None
        self.arrays: Sequence[Any] = ()
        self.runs: list[Any] = []


class _Kept(NamedTuple):
    """A routine, and the keys and arrays of the parts that it was made of."""

    keys: list[Hashable]
    given: list[Any]
    routine: Routine


class Phase:
    """One phase of an exchange bucket's step, with the routines of its last steps, which mostly recur.

    ``device``: where the gradients are.
    """

    #: The number of routines that are kept: two, as state alternates between two buffers.
    MOST = 2

    __slots__ = ("_kept", "device")

    def __init__(self, device: Device) -> None:
        self.device = device
        self._kept: list[_Kept] = []  # in the order of their last runs

    def collecting(self) -> Collected:
        """Returns the collector of this run's parts."""
        return Collected(self)

    def find(self, keys: list[Hashable], given: list[Any]) -> _Kept | None:
        """Returns the routine of these parts; forgets one with the same keys over other arrays."""
        kept = self._kept
        for place in range(len(kept) - 1, -1, -1):
            one = kept[place]
            if one.keys == keys:
                if len(one.given) == len(given) and all(map(is_, given, one.given)):
                    return one
                del kept[place]
        return None

    def keep(self, one: _Kept) -> None:
        """Keeps a routine for later steps."""
        if self._kept and self._kept[-1] is one:
            return
        self.forget(one)
        self._kept.append(one)
        del self._kept[: -self.MOST]

    def forget(self, one: _Kept) -> None:
        """Drops a routine, as after a failure."""
        self._kept = [each for each in self._kept if each is not one]


class Collected:
    """Collects the calls that its thread passes to :func:`run` in its blocks; :meth:`start` runs them.

    On a device they run as one call, on the host one by one.

    After :meth:`start` it is a :class:`Pending`.
    """

    __slots__ = ("_call", "_is_new", "_kernels", "_one", "_parts", "_phase")

    def __init__(self, phase: Phase) -> None:
        self._phase, self._kernels = phase, phase.device.kernels
        self._parts: list[_Part] = []
        self._call: Pending | None = None

    def __enter__(self) -> Collected:
        assert getattr(_thread, "parts", None) is None, "a phase cannot be entered inside another one"
        _thread.parts = self._parts
        return self

    def __exit__(self, *_: object) -> None:
        _thread.parts = None

    def start(self) -> bool:
        """Starts the collected calls; follows the last block. Returns whether :meth:`finish` has something to do."""
        parts, phase = self._parts, self._phase
        if not parts:
            return False
        keys = [part.key for part in parts]
        given = [array for part in parts for array in part.arrays]
        found = phase.find(keys, given)
        self._is_new = found is None
        one = self._one = found or _Kept(keys, given, Routine())
        if phase.device.driver is None:
            for part in parts:
                part.work()
            self._conclude()
            return False
        try:
            if self._is_new:
                with self._kernels.together(one.routine) as started:
                    for part in parts:
                        part.work()
                self._call = started
            else:
                self._call = self._kernels.start_again(one.routine)
        except ValueError:
            self._failed()
            raise
        return True

    def done(self) -> bool:
        return self._call is None or self._call.done()

    def finish(self) -> None:
        call, self._call = self._call, None
        if call is None:
            return
        one = self._one
        try:
            call.finish()
            if self._is_new and one.routine.prepared is not None:
                self._kernels.finalise(one.routine, one.given)
        except ValueError:
            self._failed()
            raise
        self._conclude()

    def _failed(self) -> None:
        """Runs the parts one by one, so that the faulty one raises its own error."""
        self._phase.forget(self._one)
        for part in self._parts:
            part.work()

    def _conclude(self) -> None:
        one = self._one
        if one.routine.prepared is not None:
            self._phase.keep(one)
        for part in self._parts:
            if part.after is not None:
                part.after()


@contextmanager
def at_once() -> Iterator[None]:
    """Makes :func:`run` run this thread's calls immediately inside the block, and return when results have arrived."""
    parts = getattr(_thread, "parts", None)
    _thread.parts = None
    try:
        yield
    finally:
        _thread.parts = parts


def run(
    key: Hashable, arrays: Sequence[Any], work: Callable[[], None], after: Callable[[], None] | None = None
) -> None:
    """Collects ``work``, which calls kernels, for this thread's phase; runs it at once outside a phase.

    If a phase on a device consists of the same calls as an earlier one, the device repeats the prepared call with the
    present contents of the arrays, without calling ``work``. Therefore ``work`` must only call kernels, and no kernel
    may read what another kernel of the phase writes on the host.

    Args:
        key: everything except ``arrays`` that determines the calls: numbers, and the contents of arrays by which the
            choice of kernels or their parameters differ.
        arrays: tables and messages that are the same objects from step to step. Other arrays that ``work`` uses are
            reused as well, so they must belong to these calls alone.
        work: calls kernels.
        after: called when the results have arrived.
    """
    parts: list[_Part] | None = getattr(_thread, "parts", None)
    if parts is not None:
        parts.append(_Part(key, arrays, work, after))
        return
    work()
    if after is not None:
        after()
