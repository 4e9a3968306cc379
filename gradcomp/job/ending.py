"""Whether this process ends with an exception that nobody caught.

What counts is what ``sys.excepthook`` is called for: an exception in the main thread that ends the program. An error at
an interactive prompt or in a notebook's cell ends nothing. Nor does one in another thread; and ``sys.exit``, with
whatever status, is an end that the program wanted.
"""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any

from gradcomp.core.errors import TransportError

_uncaught: BaseException | None = None
_before: Any = None
#: Frames of these packages say nothing about an error whose cause lies in another process.
_MACHINERY = ("gradcomp", "torch", "concurrent", "keras", "tensorflow")


def observe() -> None:
    """Be called for uncaught exceptions, before who was called so far."""
    global _before, _uncaught
    _uncaught = None
    if sys.excepthook is not _hook:
        _before, sys.excepthook = sys.excepthook, _hook


def stop_observing() -> None:
    """Give the hook back, unless another has taken it since."""
    if sys.excepthook is _hook:
        sys.excepthook = _before


def uncaught() -> BaseException | None:
    """The exception that ends this process, if one does."""
    return _uncaught


def _hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    global _uncaught
    if not _interactive():
        _uncaught = error
        if isinstance(error, TransportError):
            _shorten(error, traceback)
    _before(kind, error, traceback)


def _interactive() -> bool:
    """Whether somebody sits at a prompt, now or, by ``python -i``, soon."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive)


def _shorten(error: BaseException, traceback: TracebackType | None) -> None:
    """Leave the program's own frames: the error's text says what happened, and it was elsewhere."""
    error.__cause__, error.__suppress_context__ = None, True
    last, entry = None, traceback
    while entry is not None:
        package = str(entry.tb_frame.f_globals.get("__name__")).partition(".")[0]
        if package not in _MACHINERY:
            last = entry
        entry = entry.tb_next
    if last is not None:
        last.tb_next = None
