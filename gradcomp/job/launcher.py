"""Ends this rank when its launcher is gone, since nobody would then collect the job's processes."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep

from gradcomp.core.errors import TransportError
from gradcomp.engine.keys import ABORT
from gradcomp.engine.watch import publish_abort
from gradcomp.job.state import Runtime

logger = logging.getLogger("gradcomp")

#: Only launchers set these variables, each to values of its own. Users may set others (``RANK``, ``MASTER_ADDR``).
_MARKS = (
    "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "HOROVOD_GLOO_RENDEZVOUS_PORT", "PMIX_NAMESPACE", "PMI_FD",
    "PMI_PORT", "SLURM_STEP_ID",
)  # fmt: skip

#: From the launcher's end to SIGTERM, which a program may handle; from there to SIGKILL, as under torchrun.
TERMINATE_SECONDS, KILL_SECONDS = 5.0, 30.0


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
    """Let the watchdog look for the launcher, if there is one, and end this rank soon after it.

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
