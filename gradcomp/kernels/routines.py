"""Kernel calls that come again in every step, over the same arrays."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import is_
from typing import Any

from gradcomp.kernels import bodies

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
    what the device has checked once it does not check again. :meth:`collecting` takes parts that say by a key whether
    anything is new; if nothing is, none of them is asked. On the host the kernels run one by one, every time.
    """

    __slots__ = ("_given", "_keys", "arrays", "device", "prepared", "runs")

    def __init__(self) -> None:
        self.device: Any = None  # its kernels; None on the host, or as long as nobody knows
        # What the device keeps: the call, its arrays, and what it was put together from.
        self.prepared: Any = None
        self.arrays: Sequence[Any] = ()
        self.runs: list[Any] = []
        self._keys: list[Hashable] = []
        self._given: list[Any] = []

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """What this thread runs by :func:`run` meanwhile is done at the end, in one call on a device.

        It is the same calls in every step, mostly; else they are put together anew.
        """
        assert getattr(_thread, "parts", None) is None, "a routine is no part of another one"
        parts: list[_Part] = []
        _thread.parts = parts
        try:
            yield
        finally:
            _thread.parts = None
        if parts:
            self._run(parts)

    def _run(self, parts: Sequence[_Part]) -> None:
        keys = [part.key for part in parts]
        given = [array for part in parts for array in part.arrays]
        if self.prepared is None or keys != self._keys or not all(map(is_, given, self._given)):
            self.prepared, self.runs, self.device = None, [], bodies.device_of(given)
        if self.device is None:
            for part in parts:
                part.work()
        else:
            try:
                if self.prepared is not None:
                    self.device.run_again(self)
                else:
                    self._put_together(parts, given)
            except BaseException as error:
                self.prepared = None
                if isinstance(error, ValueError):  # one by one they say where the fault is
                    for part in parts:
                        part.work()
                raise
        self._keys, self._given = keys, given
        for part in parts:
            if part.after is not None:
                part.after()

    def _put_together(self, parts: Sequence[_Part], given: Sequence[Any]) -> None:
        with self.device.together(self.device, self) as started:
            for part in parts:
                part.work()
        started.finish()
        if self.prepared is not None:
            self.device.finalise(self, given)


@contextmanager
def at_once() -> Iterator[None]:
    """Inside, what this thread runs is no part of its routine: results are there when :func:`run` returns."""
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
    """Let ``work`` call kernels, at the end of this thread's routine, or at once where it is in none.

    A routine that is the same as the last time is repeated on a device: with what the arrays hold now, and without
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
