"""An elastic job of plain processes: they start one by one, and die where the test says."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import launching
import numpy as np
import preloaded

from gradcomp.job.jobstore import serve_alone


class Job:
    """A store, and the processes of a program that meet in it.

    The program's lines of JSON are what a process has ``said``. ``DIE`` is the step after whose backward pass a process
    kills itself.
    """

    def __init__(
        self, program: str, directory: Path, settings: dict[str, str], imported: tuple[str, ...]
    ) -> None:
        self._imported = imported
        self._program = directory / "program.py"
        self._program.write_text(textwrap.dedent(program), encoding="utf-8")
        self._store = serve_alone("127.0.0.1", 0)
        self._variables = {"GRADCOMP_STORE": f"127.0.0.1:{self._store.port}", **settings}
        self.processes: list[launching._Started] = []

    def start(self, *arguments: object, **variables: object) -> int:
        """Start one more process; its number."""
        given = {**self._variables, **{name: str(value) for name, value in variables.items()}}
        command = ["python", str(self._program), *map(str, arguments)]
        name = str(len(self.processes))
        started = launching._fork(self._imported, {}, command, given, self._program.parent, name)
        self.processes.append(started)
        return len(self.processes) - 1

    def wait(self, number: int, timeout: float = 60.0) -> int:
        """How a process ended."""
        return self.processes[number].process.wait(timeout)

    def kill(self, number: int) -> None:
        os.kill(self.processes[number].process.pid, signal.SIGKILL)

    def said(self, number: int) -> list[dict[str, Any]]:
        path = self.processes[number].stdout
        text = path.read_text() if path.exists() else ""  # a process makes its own, when it begins
        whole = text[: text.rfind("\n") + 1]  # a process may be writing the next line
        return [json.loads(line) for line in whole.splitlines() if line.startswith("{")]

    def until(self, condition: Callable[[], bool], timeout: float = 60.0) -> None:
        """Wait for a condition; a failure shows what all processes logged."""
        deadline = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < deadline, [self.log(n) for n in range(len(self.processes))]
            time.sleep(0.02)

    def log(self, number: int) -> str:
        return self.processes[number].stderr.read_text()

    def finish(self, timeout: float = 60.0) -> list[int]:
        """How all processes ended, which end by themselves."""
        return [self.wait(number, timeout) for number in range(len(self.processes))]


@contextlib.contextmanager
def job(program: str, imported: tuple[str, ...] = preloaded.TORCH, **settings: object) -> Iterator[Job]:
    """A job whose processes end with the block; they begin with these modules imported."""
    with tempfile.TemporaryDirectory(prefix="gradcomp-test-") as directory:
        given = {name: str(value) for name, value in settings.items()}
        made = Job(program, Path(directory), given, imported)
        try:
            yield made
        finally:
            for number in range(len(made.processes)):
                with contextlib.suppress(ProcessLookupError):
                    if made.processes[number].process.returncode is None:
                        made.kill(number)


def telescoped(said: list[list[dict[str, Any]]]) -> set[int]:
    """The sizes of the worlds in which all ranks said what they applied, had and have left, after it was added up.

    N (w_0 - w_t) = sum over ranks of g_i + r_i(0) - r_i(t), and N times the same of server-side errors.
    """
    groups: dict[tuple[int, int, int], list[dict[str, Any]]] = {}
    for one in (one for of_process in said for one in of_process if "applied" in one):
        groups.setdefault((one["size"], one["begun"], one["step"]), []).append(one)
    whole = {key: ranks for key, ranks in groups.items() if len(ranks) == key[0]}
    for (size, *_), ranks in whole.items():
        summed = sum(r["own"] + r["before"][0] - r["after"][0] for r in ranks)
        summed += size * sum(r["before"][1] - r["after"][1] for r in ranks)
        assert np.isclose(size * ranks[0]["applied"], summed, rtol=1e-4, atol=2e-2)
    return {size for size, *_ in whole}


def went_on(lines: list[dict[str, Any]]) -> None:
    """A survivor has what it had left at the commit, in the units of the new size."""
    for place in [place for place, one in enumerate(lines) if "left" in one][1:]:
        begin = lines[place]
        at = [one for one in lines[:place] if one.get("step") == begin["begun"]][-1]
        kept = at["after"][0] + begin["size"] * at["after"][1]
        assert np.isclose(begin["left"][0] + begin["size"] * begin["left"][1], kept, rtol=1e-4, atol=1e-3)
