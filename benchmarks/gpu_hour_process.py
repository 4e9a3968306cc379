"""A process with a time limit: at its end nothing that it started is left."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

#: What is kept of a stage's output, from its end.
LINES = 60
LINE_CHARACTERS = 300

#: Before its limit a process is asked to end: pytest then ends the ranks that its tests have started.
GRACE_SECONDS = 4.0


@dataclass(frozen=True)
class Ended:
    """How a process ended. ``code``: None if that was at its limit. ``lines``: the last of its output."""

    code: int | None
    lines: list[str]


def run_limited(command: Sequence[str], seconds: float, variables: Mapping[str, str], folder: Path) -> Ended:
    """Run a command, its output in a file: a full pipe would stop it."""
    with tempfile.TemporaryFile() as output:
        try:
            process = subprocess.Popen(
                command,
                cwd=folder,
                env=dict(variables),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            return Ended(127, [str(error)])
        code: int | None = None
        try:
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(seconds - min(GRACE_SECONDS, seconds / 2))
        finally:
            _end(process, seconds, ask=code is None)
        output.seek(0)
        return Ended(code, _last_lines(output.read()))


def _end(process: subprocess.Popen[bytes], seconds: float, *, ask: bool) -> None:
    """No process of the group is left, nor a child in a group of its own, as ranks are."""
    family = _family(process.pid)
    if ask:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(min(GRACE_SECONDS, seconds / 2))
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for pid, started in family.items():
        if _started(pid) == started:  # else the number is another's by now
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    process.wait()


def _family(pid: int) -> dict[int, str]:
    """All living descendants of a process, each with the time of its start."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        fields = _fields(int(folder.name))
        if fields:
            children.setdefault(int(fields[1]), []).append(int(folder.name))
    found: dict[int, str] = {}
    waiting = [pid]
    while waiting:
        for child in children.get(waiting.pop(), []):
            found[child] = _started(child)
            waiting.append(child)
    return found


def _fields(pid: int) -> list[str]:
    """Of /proc/PID/stat, those behind the name: state, parent, ...; none if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()


def _started(pid: int) -> str:
    fields = _fields(pid)
    return fields[19] if fields else ""


def _last_lines(output: bytes) -> list[str]:
    lines = output.decode(errors="replace").replace("\r", "\n").rstrip().splitlines()[-LINES:]
    return [line[:LINE_CHARACTERS] for line in lines]
