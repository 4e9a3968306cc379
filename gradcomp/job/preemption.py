"""``handle_preemption``: a signal such as SIGTERM is noted, and the next exchange tells the other ranks."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from gradcomp.core.errors import ConfigError, StateError
from gradcomp.exchange.preemption import Preemption

#: What this process was told; ``agreed`` is of its present job.
process = Preemption()
#: By signal, the handler that was installed and the one before it.
_installed: dict[int, tuple[Callable[[int, FrameType | None], None], Any]] = {}
#: These are not called when a signal is noted: the second raises KeyboardInterrupt.
_DEFAULTS = (signal.SIG_DFL, signal.SIG_IGN, signal.default_int_handler)


def handle_preemption(*signals: int) -> None:
    """Note these signals instead of ending the process; without arguments, SIGTERM.

    The next exchange of all ranks tells the others, and ``preempted()`` is then true on all of them. A handler that the
    program has installed before is called as well. One that it installs later replaces this one, unless it calls the
    handler that it finds; this function may be called again then. ``shutdown()``, and a fork in its child, give the
    signals back to the earlier handlers.

    Local: it may be called before or after ``init``. All ranks should call it, since a launcher often signals all of
    them, and one that does not handle the signal ends at once.

    Args:
        signals: numbers such as ``signal.SIGTERM`` or ``signal.SIGUSR1``.

    Raises:
        ConfigError: for a number that is no signal, and for SIGKILL and SIGSTOP, which cannot be handled.
        StateError: outside of the main thread, where Python installs no handlers, and if a handler that was not
            installed from Python, and so cannot be called from it, has the signal.
    """
    chosen = signals or (signal.SIGTERM,)
    if threading.current_thread() is not threading.main_thread():
        raise StateError(
            "handle_preemption() must be called in the main thread: Python installs signal handlers there"
        )
    for number in chosen:
        valid = isinstance(number, int) and number in signal.valid_signals()
        if not valid or number in (signal.SIGKILL, signal.SIGSTOP):
            raise ConfigError(
                f"handle_preemption() takes signals that a process can handle, got {number!r:.80}"
            )
        if signal.getsignal(number) is None:
            raise StateError(
                f"{signal.strsignal(number)}: the signal has a handler that was not installed from Python, which "
                "handle_preemption() cannot call"
            )
    for number in chosen:
        _install(number)


def _install(number: int) -> None:
    before: Any = signal.getsignal(number)
    if number in _installed and before is _installed[number][0]:
        return

    def note(number: int, frame: FrameType | None) -> None:
        process.requested = True
        if before not in _DEFAULTS:
            before(number, frame)

    _installed[number] = note, before
    signal.signal(number, note)


def restore() -> None:
    """Give every signal back to the handler before ours, unless another one has replaced ours."""
    if threading.current_thread() is not threading.main_thread():
        return  # Python changes no handlers there
    for number, (handler, before) in _installed.items():
        if signal.getsignal(number) is handler:
            signal.signal(number, before)
    _installed.clear()


#: ``mask``: the signals that a thread which forks had blocked before.
_forking = threading.local()


def _block() -> None:
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _installed)


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _in_child() -> None:
    restore()
    _unblock()


# A worker of a data loader that inherited the handler could not be terminated. A signal that comes before the worker
# has given the handler back waits until then.
os.register_at_fork(before=_block, after_in_parent=_unblock, after_in_child=_in_child)
