"""The end of this process: by an uncaught exception, or because its launcher is gone.

An exception counts if ``sys.excepthook`` is called for it: it was raised in the main thread and ends the program. An
error at an interactive prompt or in a notebook's cell does not end the program, nor does one in another thread.
``sys.exit``, with whatever status, is an end that the program chose. If the launcher is gone, nobody would collect the
job's processes, so the rank ends itself.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from types import TracebackType
from typing import Any

from gradcomp.core.errors import TransportError
from gradcomp.exchange.members import publish_abort
from gradcomp.exchange.watchdog import ABORT
from gradcomp.job.state import Runtime

_uncaught: BaseException | None = None
_before: Any = None
#: Frames of these packages say nothing about an error whose cause lies in another process.
_MACHINERY = ("gradcomp", "torch", "concurrent", "keras", "tensorflow")

logger = logging.getLogger("gradcomp")
#: Only launchers set these variables, each to values of its own. Users may set others (``RANK``, ``MASTER_ADDR``).
_MARKS = (
    "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "HOROVOD_GLOO_RENDEZVOUS_PORT", "PMIX_NAMESPACE", "PMI_FD",
    "PMI_PORT", "SLURM_STEP_ID",
)  # fmt: skip
#: From the launcher's end to SIGTERM, which a program may handle; from there to SIGKILL, as under torchrun.
TERMINATE_SECONDS, KILL_SECONDS = 5.0, 30.0


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
    prompt = hasattr(sys, "ps1") or sys.flags.interactive  # now or, with python -i, after the program
    if not prompt:
        _uncaught = error
        if isinstance(error, TransportError):
            _shorten(error, traceback)
    _before(kind, error, traceback)


def _shorten(error: BaseException, traceback: TracebackType | None) -> None:
    """Cut the traceback after the program's own frames: the cause is in another process, and the text names it."""
    error.__cause__, error.__suppress_context__ = None, True
    last, entry = None, traceback
    while entry is not None:
        package = str(entry.tb_frame.f_globals.get("__name__")).partition(".")[0]
        if package not in _MACHINERY:
            last = entry
        entry = entry.tb_next
    if last is not None:
        last.tb_next = None


@dataclass(frozen=True)
class Process:
    """Identifies a process by its number and its start, in clock ticks since boot, because numbers are used again."""

    number: int
    born: int

    @property
    def lives(self) -> bool:
        """Return whether it runs; a zombie does not."""
        found = _stat(self.number)
        return found is not None and found[0] not in "ZX" and int(found[19]) == self.born


def own_process() -> Process:
    """Return this process; one born at 0, which none is, where the system does not tell."""
    found = _stat(os.getpid())
    return Process(os.getpid(), 0 if found is None else int(found[19]))


def launcher_of(environ: Mapping[str, str]) -> Process | None:
    """Return the launcher's process on this host: the nearest ancestor without the variables that the launcher set.

    A shell between it and this process has these variables, and so has a rank that started this process. None where no
    launcher set any, and where the ancestors cannot be seen, as from inside a container.
    """
    marks = {f"{name}={environ[name]}".encode() for name in _MARKS if name in environ}
    number = os.getppid()
    while marks and number > 1:
        found = _stat(number)
        try:
            held = Path(f"/proc/{number}/environ").read_bytes().split(b"\0")
        except PermissionError:  # another user's, as Slurm's is
            held = []
        except OSError:
            return None
        if found is None:
            return None
        if not marks.issubset(held):
            return Process(number, int(found[19]))
        number = int(found[1])
    return None


def watch_launcher(runtime: Runtime) -> None:
    """Make the watchdog monitor the launcher, if there is one, and end this rank soon after the launcher.

    Waits for other ranks and requests to them then raise TransportError, and so does every other rank. A program that
    is in no call of gradcomp gets SIGTERM after ``TERMINATE_SECONDS``, as from the launcher.
    """
    launcher = launcher_of(os.environ)

    def look() -> TransportError | None:
        if launcher is None or launcher.lives:
            return None
        name = "the launcher" if runtime.launch.launcher == "process group" else runtime.launch.launcher
        error = TransportError(
            f"rank {runtime.rank}: {name} (process {launcher.number}), which started it, is gone, so this rank ends too"
        )
        logger.error("%s", error)
        threading.Thread(target=_end, args=(runtime, str(error)), name="gradcomp-end", daemon=True).start()
        return error

    runtime.watchdog.beside = look


def _end(runtime: Runtime, reason: str) -> None:
    began = monotonic()
    publish_abort(runtime.watchdog, ABORT, reason)
    sleep(max(0.0, began + TERMINATE_SECONDS - monotonic()))
    os.kill(os.getpid(), signal.SIGTERM)
    sleep(KILL_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


def _stat(number: int) -> list[str] | None:
    """Return the fields of ``/proc/NUMBER/stat`` after the program's name: the state, the parent, and so on."""
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
