"""Runs the checks of the transport contract on the ranks of an engine, all of them in one launch.

A rank is a process, or a thread where the engine is one process. Ranks meet through files in a directory of the launch,
never through the transport that is under test. A check that fails on some ranks only ends the launch, for the ranks no
longer agree where they are; the checks behind it then fail too and name it.
"""

from __future__ import annotations

import functools
import json
import os
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launching import Finished

from gradcomp.transport.base import Handle, Transport

#: How long ranks wait for each other, and for a handle.
PATIENCE_SECONDS = 30.0


@dataclass(frozen=True)
class Engine:
    """A transport under test. ``make(rank, ranks)`` is called on each of ``ranks``, in the same order on all."""

    name: str
    make: Callable[[Rank, Sequence[int]], Transport]
    launch: Callable[[str, int], list[Finished]] | None
    worlds: tuple[int, ...] = (1, 2, 3, 4)
    #: Once per process, before and after all checks.
    begin: Callable[[Rank], None] = lambda rank: None
    end: Callable[[Rank], None] = lambda rank: None
    #: How a rank leaves in the middle; None: the engine ends the others.
    leave: Callable[[Rank], None] | None = lambda rank: os._exit(0)
    #: Its allreduce sends what the formula says.
    flat: bool = True
    #: It sums to one rank, and sends from one rank, in one operation: of two levels those inside each host.
    rooted: bool = False
    #: What is not here, or nothing.
    missing: Callable[[], str] = lambda: ""

    def __str__(self) -> str:
        return self.name


@dataclass(eq=False)
class Rank:
    """Gives a check its rank, the transport of all ranks, more transports, and messages that bypass them."""

    engine: Engine
    rank: int
    size: int
    directory: Path
    #: One process's ranks share it.
    shared: dict[Any, Any] = field(default_factory=dict)
    lock: Any = field(default_factory=threading.Lock)
    _meetings: dict[tuple[int, ...], int] = field(default_factory=dict)
    _transport: Transport | None = None

    @property
    def transport(self) -> Transport:
        """The transport of all ranks. (A cached_property would hold one lock for all ranks that are threads.)"""
        if self._transport is None:
            self._transport = self.make()
        return self._transport

    def make(self, ranks: Sequence[int] | None = None) -> Transport:
        """Makes another transport among some ranks."""
        return self.engine.make(self, range(self.size) if ranks is None else ranks)

    def meet(self, message: bytes = b"", ranks: Sequence[int] | None = None) -> list[bytes]:
        """Returns every rank's message, in rank order."""
        members = tuple(range(self.size) if ranks is None else ranks)
        number = self._meetings[members] = self._meetings.get(members, 0) + 1
        files = [self.directory / f"{'-'.join(map(str, members))}.{number}.{member}" for member in members]
        write(files[members.index(self.rank)], message)
        wait_for(files)
        return [file.read_bytes() for file in files]

    def judge(self, check: str, verdict: str) -> None:
        """Writes this rank's verdict: what went wrong, or nothing."""
        write(self.directory / f"{check}.verdict.{self.rank}", verdict.encode())

    def settle(self, *handles: Handle) -> None:
        """Polls the handles in turn until all are complete."""
        left = list(handles)

        def turn() -> bool:
            left[:] = [handle for handle in left if not handle.poll()]
            return not left

        wait_until(turn, "all operations are complete")


def wait_until(true: Callable[[], bool], what: str, seconds: float = PATIENCE_SECONDS) -> None:
    """Polls until it is true. Raises AssertionError after ``seconds``."""
    deadline = time.monotonic() + seconds
    pause = 20e-6
    while not true():
        assert time.monotonic() < deadline, f"not within {seconds:.0f} s: {what}"
        time.sleep(pause)
        pause = min(2 * pause, 1e-3)


def wait_for(files: Sequence[Path]) -> None:
    """Waits until all ranks have written their files."""
    wait_until(lambda: all(file.exists() for file in files), "all ranks have come this far")


def write(file: Path, content: bytes) -> None:
    """Writes the file in one step, so that no rank reads a part of it."""
    partial = file.with_name(file.name + ".partial")
    partial.write_bytes(content)
    partial.rename(file)


# ------------------------------------------------------------------------------------------ beside pytest


@functools.cache
def verdicts(engine: Engine, world: int, checks: tuple[str, ...]) -> dict[str, str]:
    """Returns by check what went wrong on any rank; the empty string if nothing did."""
    with tempfile.TemporaryDirectory(prefix="gradcomp-contract-") as name:
        directory = Path(name)
        task = {"engine": engine.name, "world": world, "directory": name, "checks": checks}
        if engine.launch is None:
            ends = _in_threads(engine, task)
        else:
            source = f"import contract\ncontract.work({json.dumps(task)!r})\n"
            ends = [f"exit {end.returncode}\n{end.stderr[-3000:]}" for end in engine.launch(source, world)]
        found = {check: list(_read(directory, check, world, ends)) for check in checks}
    result: dict[str, str] = {}
    failed = ""
    for check in checks:
        silent = sum(text.startswith("no verdict") for text in found[check])
        skipped = failed and silent == world
        result[check] = f"not run: {failed} failed" if skipped else "\n".join(filter(None, found[check]))
        failed = failed or (check if result[check] else "")
    return result


def _read(directory: Path, check: str, world: int, ends: Sequence[str]) -> Iterator[str]:
    for rank in range(world):
        file = directory / f"{check}.verdict.{rank}"
        if not file.exists():
            yield f"no verdict from rank {rank}: {ends[min(rank, len(ends) - 1)]}"
        elif text := file.read_text():
            yield f"rank {rank}: {text}"


def _in_threads(engine: Engine, task: dict[str, Any]) -> list[str]:
    shared: dict[Any, Any] = {}
    lock = threading.Lock()
    ranks = [
        Rank(engine, rank, task["world"], Path(task["directory"]), shared, lock)
        for rank in range(task["world"])
    ]
    threads = [
        threading.Thread(target=_check_all, args=(rank, task["checks"]), daemon=True) for rank in ranks
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * PATIENCE_SECONDS)
    return ["still running" if thread.is_alive() else "ended" for thread in threads]


# ------------------------------------------------------------------------------------------ on a rank


def work(text: str) -> None:
    """Runs all checks in a rank's process."""
    from transport_engines import ENGINES, ON_GPUS, rank_of_process

    task = json.loads(text)
    engine = next(engine for engine in (*ENGINES, *ON_GPUS) if engine.name == task["engine"])
    rank = Rank(engine, rank_of_process(), task["world"], Path(task["directory"]))
    engine.begin(rank)
    agree = _check_all(rank, task["checks"])
    if not agree or (rank.size > 1 and engine.leave is not None):
        os._exit(0)  # an orderly end is not to be had
    engine.end(rank)


def _check_all(rank: Rank, checks: Sequence[str]) -> bool:
    """Runs the checks. Returns false if ranks no longer agree on the next one."""
    from transport_checks import CHECKS

    for check in checks:
        verdict = ""
        try:
            CHECKS[check](rank)
        except BaseException:  # noqa: BLE001 - the verdict is the test's
            verdict = traceback.format_exc()
        rank.judge(check, verdict)
        files = [rank.directory / f"{check}.verdict.{other}" for other in range(rank.size)]
        try:
            wait_for(files)
        except AssertionError:
            return False
        failed = [bool(file.read_bytes()) for file in files]
        if any(failed) and not all(failed):
            return False
    return True
