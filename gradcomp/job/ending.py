"""Finds out whether this process ends with an uncaught exception.

An exception counts if ``sys.excepthook`` is called for it: it was raised in the main thread and ends the program. An
error at an interactive prompt or in a notebook's cell does not end the program, nor does one in another thread.
``sys.exit``, with whatever status, is an end that the program chose.
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
    """Install a hook for uncaught exceptions, which calls the earlier hook afterwards."""
    global _before, _uncaught
    _uncaught = None
    if sys.excepthook is not _hook:
        _before, sys.excepthook = sys.excepthook, _hook


def stop_observing() -> None:
    """Restore the earlier hook, unless another one has replaced ours."""
    if sys.excepthook is _hook:
        sys.excepthook = _before


def uncaught() -> BaseException | None:
    """Return the exception that ends this process, if one does."""
    return _uncaught


def _hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    global _uncaught
    if not _interactive():
        _uncaught = error
        if isinstance(error, TransportError):
            _shorten(error, traceback)
    _before(kind, error, traceback)


def _interactive() -> bool:
    """Return whether there is a prompt, now or, with ``python -i``, after the program."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive)


def _shorten(error: BaseException, traceback: TracebackType | None) -> None:
    """Cut the traceback behind the program's own frames: the cause is in another process, and the text names it."""
    error.__cause__, error.__suppress_context__ = None, True
    last, entry = None, traceback
    while entry is not None:
        package = str(entry.tb_frame.f_globals.get("__name__")).partition(".")[0]
        if package not in _MACHINERY:
            last = entry
        entry = entry.tb_next
    if last is not None:
        last.tb_next = None
