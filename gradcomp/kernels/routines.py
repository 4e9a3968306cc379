"""Kernel calls that come again in every step, over the same arrays."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import is_
from typing import Any, NamedTuple

from gradcomp.kernels.devices import Device
from gradcomp.kernels.pending import Pending

_thread = threading.local()


@dataclass(frozen=True, eq=False)
class _Part:
    """Some calls of a routine; see :func:`run`."""

    key: Hashable
    arrays: Sequence[Any]
    work: Callable[[], None]
    after: Callable[[], None] | None


class Routine:
    """Kernel calls that follow each other, over the same arrays in every step: a device keeps them as one call.

    Between two times only the contents of the arrays change, of tables only the columns of addresses. A routine goes
    through one of two doors. :func:`gradcomp.kernels.together` runs its block every time, with numbers of its own;
    what the device has checked once it does not check again. :class:`Phase` takes parts that say by a key whether
    anything is new; if nothing is, none of them is asked. On the host the kernels run one by one, every time.
    """

    __slots__ = ("arrays", "prepared", "runs")

    def __init__(self) -> None:
        # What the device keeps: the call, its arrays, and what it was put together from.
        self.prepared: Any = None
        self.arrays: Sequence[Any] = ()
        self.runs: list[Any] = []


class _Kept(NamedTuple):
    """A routine, by the parts that it was put together from."""

    keys: list[Hashable]
    given: list[Any]
    routine: Routine


class Phase:
    """What is done in one phase of a bucket in every step: mostly the same calls, or those of some steps before.

    ``device``: where the gradients are.
    """

    #: Routines that are kept: state that alternates between two places has two.
    MOST = 2

    __slots__ = ("_kept", "device")

    def __init__(self, device: Device) -> None:
        self.device = device
        self._kept: list[_Kept] = []  # what ran last comes last

    def collecting(self) -> Collected:
        """What is done this time; see :class:`Collected`."""
        return Collected(self)

    def find(self, keys: list[Hashable], given: list[Any]) -> _Kept | None:
        """The routine of these parts; one of the same keys over other arrays is forgotten."""
        kept = self._kept
        for place in range(len(kept) - 1, -1, -1):
            one = kept[place]
            if one.keys == keys:
                if len(one.given) == len(given) and all(map(is_, given, one.given)):
                    return one
                del kept[place]
        return None

    def keep(self, one: _Kept) -> None:
        """For the next time."""
        if self._kept and self._kept[-1] is one:
            return
        self.forget(one)
        self._kept.append(one)
        del self._kept[: -self.MOST]

    def forget(self, one: _Kept) -> None:
        """It has failed, perhaps."""
        self._kept = [each for each in self._kept if each is not one]


class Collected:
    """Blocks; what their thread runs by :func:`run` inside is done by :meth:`start`, in one call on a device.

    From then on it is a :class:`gradcomp.kernels.pending.Pending`.
    """

    __slots__ = ("_call", "_is_new", "_kernels", "_one", "_parts", "_phase")

    def __init__(self, phase: Phase) -> None:
        self._phase, self._kernels = phase, phase.device.kernels
        self._parts: list[_Part] = []
        self._call: Pending | None = None

    def __enter__(self) -> Collected:
        assert getattr(_thread, "parts", None) is None, "a phase is no part of another one"
        _thread.parts = self._parts
        return self

    def __exit__(self, *_: object) -> None:
        _thread.parts = None

    def start(self) -> None:
        """Behind the last block."""
        parts, phase = self._parts, self._phase
        if not parts:
            return
        keys = [part.key for part in parts]
        given = [array for part in parts for array in part.arrays]
        one = phase.find(keys, given)
        self._is_new = one is None
        if one is None:
            one = _Kept(keys, given, Routine())
        self._one = one
        if self._kernels is None:
            for part in parts:
                part.work()
            self._conclude()
            return
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

    def done(self) -> bool:
        """See :class:`gradcomp.kernels.pending.Pending`."""
        return self._call is None or self._call.done()

    def finish(self) -> None:
        """See :class:`gradcomp.kernels.pending.Pending`."""
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
        """One by one, the parts say where the fault is."""
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
    """Inside, what this thread runs is no part of its phase: results are there when :func:`run` returns."""
    parts = getattr(_thread, "parts", None)
    _thread.parts = None
    try:
        yield
    finally:
        _thread.parts = parts


def run(
    key: Hashable,
    arrays: Sequence[Any],
    work: Callable[[], None],
    after: Callable[[], None] | None = None,
) -> None:
    """Let ``work`` call kernels, at the end of this thread's phase, or at once where it is in none.

    A phase that is the same as one before is repeated on a device: with what the arrays hold now, and without
    asking ``work``. So ``work`` does nothing but call kernels, none of which needs what another one leaves on the host.

    Args:
        key: all that decides about the calls beside ``arrays``: numbers, and of what arrays hold, whatever makes
            kernels do something else.
        arrays: tables and messages that are the same objects from step to step. Other arrays that ``work`` uses are
            used again as well, so that they must belong to these calls alone.
        work: calls kernels.
        after: called when results are there.
    """
    parts: list[_Part] | None = getattr(_thread, "parts", None)
    if parts is not None:
        parts.append(_Part(key, arrays, work, after))
        return
    work()
    if after is not None:
        after()
