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
    """Kernel calls that follow each other: on a device they are one call, which is kept from step to step.

    On the host the kernels run one by one, every time.
    """

    def __init__(self) -> None:
        self._keys: list[Hashable] = []
        self._arrays: list[Any] = []
        self._device: Any = None
        self._made: Any = None

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
        arrays = [array for part in parts for array in part.arrays]
        device = self._device
        if self._made is None or keys != self._keys or not all(map(is_, arrays, self._arrays)):
            self._made, device = None, bodies.device_of(arrays)
        if device is None:
            for part in parts:
                part.work()
        else:
            try:
                self._run_on(device, parts)
            except BaseException as error:
                self._made = None
                if isinstance(error, ValueError):  # one by one they say where the fault is
                    for part in parts:
                        part.work()
                raise
        self._device, self._keys, self._arrays = device, keys, arrays
        for part in parts:
            if part.after is not None:
                part.after()

    def _run_on(self, device: Any, parts: Sequence[_Part]) -> None:
        if self._made is not None:
            self._made.run()
            return

        def keep(made: Any) -> None:
            made.finalise([array for part in parts for array in part.arrays])
            self._made = made

        with device.together(recorded=keep):
            for part in parts:
                part.work()


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
