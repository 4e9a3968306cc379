"""A few bytes from one process to the others of the same user on the same host, without a network."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import tempfile
from pathlib import Path
from typing import Any

from gradcomp.core.errors import ConfigError

_MOST_BYTES = 4096


class HostFile:
    """A short text in a file under the temporary directory, named after a job.

    Only a file that belongs to this user, that nobody else can open, and whose writer still lives counts: what an
    earlier job of the same name left behind is not there.
    """

    def __init__(self, job: str) -> None:
        digest = hashlib.sha256(job.encode()).hexdigest()[:16]
        self.path = Path(tempfile.gettempdir()) / f"gradcomp-{os.geteuid()}-{digest}"

    def write(self, text: str) -> None:
        """Put the text there, replacing what was; atomic. Raises ConfigError if that is not possible."""
        content = json.dumps({"text": text, "pid": os.getpid(), "born": _born(os.getpid())})
        try:
            handle, name = tempfile.mkstemp(prefix=self.path.name, dir=self.path.parent)  # mode 0600
            try:
                with os.fdopen(handle, "w") as file:
                    file.write(content)
                Path(name).replace(self.path)
            except OSError:
                Path(name).unlink(missing_ok=True)
                raise
        except OSError as error:
            raise ConfigError(
                f"cannot write {self.path}, by which the ranks of this host meet ({error.strerror}): "
                "set TMPDIR to a directory that works, or MASTER_ADDR and MASTER_PORT"
            ) from error

    def read(self) -> str | None:
        """The text, or None as long as no living process has written one."""
        try:
            handle = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return None
        with os.fdopen(handle, "rb") as file:
            status = os.fstat(handle)
            private = status.st_uid == os.geteuid() and not status.st_mode & 0o077
            if not private or not stat.S_ISREG(status.st_mode):
                return None
            return _text_of_living_writer(file.read(_MOST_BYTES))

    def remove(self) -> None:
        """Take the file away; the others have read it."""
        with contextlib.suppress(OSError):
            self.path.unlink()


def _text_of_living_writer(content: bytes) -> str | None:
    try:
        data: Any = json.loads(content)
        text, pid, born = data["text"], data["pid"], data["born"]
    except (ValueError, KeyError, TypeError):
        return None
    well_formed = type(text) is str and type(pid) is int and type(born) is int
    return text if well_formed and born >= 0 and _born(pid) == born else None


def _born(pid: int) -> int:
    """When a process started, in clock ticks since boot; -1 if there is no such process."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return -1
