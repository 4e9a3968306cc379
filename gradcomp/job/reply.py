"""Defines ``Reply``, the future of a user's call, which knows whether somebody waits and when the caller is done."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar, cast

from gradcomp.engine.deadlock import Callers

T = TypeVar("T")


class Reply(Generic[T]):
    """Holds what a call returns or raises. It is a future with a single lock, since a small call makes several.

    ``release``: called once, as soon as a caller has the result or the error, or has dropped the reply. ``callers``: is
    told which threads wait.
    """

    def __init__(self, release: Callable[[], None] | None = None, callers: Callers | None = None) -> None:
        self._release = release
        self._callers = callers
        self._waiting = 0
        self._result: T | None = None
        self._error: BaseException | None = None
        self._ended = False
        #: The function to call at the end. Of two threads that try, the one that pops it calls it.
        self._told_of_end: deque[Callable[[], None]] | None = None
        self._pending = threading.Lock()  # held until the call has ended
        self._pending.acquire()

    @property
    def waited_for(self) -> bool:
        """Return whether a thread is inside :meth:`result`, or a graph waits (:meth:`when_ended`)."""
        return self._waiting > 0 or self.graph_waits

    @property
    def graph_waits(self) -> bool:
        """Return whether something waits without blocking a thread, so that its threads may still make other calls."""
        return self._told_of_end is not None

    def set_result(self, result: T) -> None:
        self._result = result
        self._end()

    def set_exception(self, error: BaseException) -> None:
        self._error = error
        self._end()

    def result(self, timeout: float | None = None) -> T:
        """Wait for the end of the call and return its result; TimeoutError after ``timeout`` seconds.

        Any number of threads may wait, any number of times.
        """
        self._waiting += 1
        try:
            if not self._ended:
                # A caller with a timeout may go on after it, so it does not count as blocked.
                callers = self._callers if timeout is None else None
                if callers is not None:
                    callers.begin(self)
                try:
                    if not self._pending.acquire(timeout=-1 if timeout is None else timeout):
                        raise TimeoutError
                    self._pending.release()  # for the next thread that waits
                finally:
                    if callers is not None:
                        callers.end()
            if self._error is not None:
                raise self._error
            return cast("T", self._result)
        finally:
            self._waiting -= 1
            self._settle()

    def when_ended(self, tell: Callable[[], None]) -> None:
        """Call ``tell`` once the call has ended: on the thread that ends it, or now. Allowed once for each reply."""
        self._told_of_end = deque([tell])
        if self._ended:
            self._tell()

    def done(self) -> bool:
        """Return whether the call has ended; if it has, the caller is taken to be done with the reply."""
        if self._ended:
            self._settle()
        return self._ended

    def _end(self) -> None:
        self._ended = True
        self._pending.release()
        if self._told_of_end is not None:
            self._tell()

    def _tell(self) -> None:
        assert self._told_of_end is not None
        try:
            tell = self._told_of_end.pop()
        except IndexError:
            return  # the other thread came first
        tell()

    def _settle(self) -> None:
        release, self._release = self._release, None
        if release is not None:
            release()

    def __del__(self) -> None:
        self._settle()
