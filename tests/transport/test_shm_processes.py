"""Shared memory among real processes: ranks that die, leave, wait or just end."""

from __future__ import annotations

import itertools
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

import preloaded
import pytest
from launching import Finished, run_ranks
from tiers import every_value

#: What every rank starts with; ``rank``, ``size`` and ``transport`` are for the body.
_START = """
import os, signal, sys, time
import numpy as np
from gradcomp import TransportError
from gradcomp.transport.shm import ShmTransport

sys.path.insert(0, sys.argv[2])
from shared_memory import FileMeet, settle

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
meet = FileMeet(sys.argv[1], rank, size)
"""
_JOIN = "transport = ShmTransport(rank, size, meet)\n"


def run(body: str, size: int, start: str = _START + _JOIN, timeout: float = 40.0) -> list[Finished]:
    with tempfile.TemporaryDirectory(prefix="gradcomp-meet-") as directory:
        tests = str(Path(__file__).parent.parent)
        program = start + textwrap.dedent(body)
        return run_ranks(
            program, size, arguments=(directory, tests), timeout=timeout, imported=preloaded.PLAIN
        )


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    assert not [file for file in Path("/dev/shm").iterdir() if "gradcomp" in file.name]


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.full), 4])
def test_ranks_that_end_without_a_word_have_correct_sums(size: int) -> None:
    """Nobody closes anything; several steps of several collectives under way."""
    finished = run(
        """
        rng = np.random.default_rng(rank)
        for step in range(5):
            arrays = [np.full(n, rank + step, np.float32) for n in (1, 1000, 3_000_001, 0, 77)]
            gathered = np.zeros(size * 1001, np.uint8)
            gathered[rank * 1001 : (rank + 1) * 1001] = rank + 1
            settle([*map(transport.allreduce, arrays), transport.allgatherv(gathered, [1001] * size)])
            for array in arrays:
                assert (array == size * (size - 1) / 2 + size * step).all()
            assert (gathered == np.repeat(np.arange(size) + 1, 1001)).all()
        print("fine")
        """,
        size,
    )
    for end in finished:
        assert (end.returncode, end.stdout) == (0, "fine\n"), end.stderr


_WAIT_AND_TELL = """
try:
    while True:
        settle([transport.allreduce(np.ones(4_000_000, np.float32)) for _ in range(3)])
except TransportError as error:
    print(error)
    print(time.time())
"""


@pytest.mark.parametrize(
    ("end", "code", "size"),
    [
        pytest.param("os.kill(os.getpid(), signal.SIGKILL)", -9, 2, marks=pytest.mark.full),
        ("os.kill(os.getpid(), signal.SIGKILL)", -9, 4),
        ("""raise ValueError("a user's own")""", 1, 3),
    ],
)
def test_a_rank_that_ends_is_named_by_every_other_within_a_second(end: str, code: int, size: int) -> None:
    finished = run(
        f"""
        if rank == 1:
            settle([transport.allreduce(np.ones(4_000_000, np.float32)) for _ in range(3)])
            transport.allreduce(np.ones(4_000_000, np.float32))
            time.sleep(2e-3)
            print(time.time(), flush=True)
            {end}
        {textwrap.indent(_WAIT_AND_TELL, " " * 8)}
        """,
        size,
    )
    assert finished[1].returncode == code
    assert code == -9 or "a user's own" in finished[1].stderr
    ended_at = float(finished[1].stdout)
    for rank in set(range(size)) - {1}:
        assert finished[rank].returncode == 0, finished[rank].stderr
        text, told_at = finished[rank].stdout.splitlines()
        assert "rank 1" in text
        assert code != -9 or float(told_at) - ended_at < 1.0


@pytest.mark.parametrize(("when", "victim"), every_value(itertools.product([0, 1, 2], [0, 1])))
def test_a_rank_killed_while_joining_leaves_nothing(when: int, victim: int) -> None:
    """There is no name by which a segment could stay; whoever waits for the rank goes on by its own deadline."""
    finished = run(
        f"""
        def dying(message):
            if meet.calls == {when}:
                if rank == {victim}:
                    os.kill(os.getpid(), signal.SIGKILL)
                meet.seconds = 1.0
            return meet(message)

        try:
            transport = ShmTransport(rank, size, dying)
            if {when} == 2 and rank == {victim}:
                os.kill(os.getpid(), signal.SIGKILL)
            settle([transport.allreduce(np.ones(9, np.float32))])
        except (AssertionError, TransportError) as error:
            print(type(error).__name__, error)
        """,
        2,
        _START,
    )
    assert finished[victim].returncode == -9
    other = finished[1 - victim]
    assert other.returncode == 0, other.stderr
    assert f"rank {victim}" in other.stdout if when == 2 else "not all ranks came" in other.stdout


def test_a_rank_in_a_stopped_process_is_waited_for() -> None:
    """Stopped is not dead: the engine's deadline is for that."""
    finished = run(
        """
        import subprocess
        array = np.ones(4_000_000, np.float32)
        if rank == 1:
            subprocess.Popen(["/bin/sh", "-c", f"sleep 0.6; kill -CONT {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)
        settle([transport.allreduce(array)])
        print(array[0])
        """,
        2,
    )
    assert [end.stdout for end in finished] == ["2.0\n"] * 2, finished


def test_an_end_in_the_middle_of_a_collective_is_no_crash() -> None:
    finished = run(
        """
        transport.allreduce(np.ones(16_000_000, np.float32))
        if rank == 0:
            time.sleep(0.2)
        """,
        2,
    )
    assert [(end.returncode, end.stderr) for end in finished] == [(0, "")] * 2


def test_waiting_for_a_late_rank_takes_no_processor() -> None:
    finished = run(
        """
        from gradcomp.transport.base import wait

        settle([transport.allreduce(np.ones(100, np.float32))])
        if rank == 0:
            time.sleep(1.0)
        before = time.process_time()
        wait(transport.allreduce(np.ones(100, np.float32)))
        print(time.process_time() - before)
        """,
        3,
    )
    for end in finished[1:]:
        assert float(end.stdout) < 0.15  # of a second; the polls are part of it


def test_a_forked_child_may_live_on() -> None:
    """The child of a killed rank does not keep it alive, nor does its end close anything."""
    finished = run(
        f"""
        child = os.fork()
        if child == 0:
            time.sleep(0.3 if rank == 1 else 0.0)
            sys.exit(0)
        settle([transport.allreduce(np.ones(100, np.float32))])
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        assert os.waitpid(child, 0)[1] == 0
        {textwrap.indent(_WAIT_AND_TELL, " " * 8)}
        """,
        2,
    )
    assert finished[0].returncode == 0, finished[0].stderr
    assert "rank 1" in finished[0].stdout
