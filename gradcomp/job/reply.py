"""The future of a user's call: it knows whether somebody waits for it, and when its caller is done with it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


class Reply(Future[T]):
    """``release``: called once, as soon as a caller has the result or the error, or has dropped the future."""

    def __init__(self, release: Callable[[], None] | None = None) -> None:
        super().__init__()
        self._release = release
        self._waiting = 0

    @property
    def waited_for(self) -> bool:
        """Whether a thread is inside :meth:`result`."""
        return self._waiting > 0

    def result(self, timeout: float | None = None) -> T:
        """See ``Future``."""
        self._waiting += 1
        try:
            return super().result(timeout)
        finally:
            self._waiting -= 1
            self._settle()

    def done(self) -> bool:
        """See ``Future``."""
        ended = super().done()
        if ended:
            self._settle()
        return ended

    def _settle(self) -> None:
        release, self._release = self._release, None
        if release is not None:
            release()

    def __del__(self) -> None:
        self._settle()
