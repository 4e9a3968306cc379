"""Ranks that are forks of a process which has imported what they need."""

from __future__ import annotations

import pytest
from launching import run_ranks

ENDS = {
    "import os; print(os.environ['RANK'])": (0, "0\n", ""),
    "import atexit; atexit.register(print, 'at exit'); raise SystemExit(3)": (3, "at exit\n", ""),
    "import os; os.kill(os.getpid(), 9)": (-9, "", ""),
}


@pytest.mark.parametrize(("program", "expected"), ENDS.items(), ids=["returns", "exits", "is killed"])
def test_a_fork_ends_as_an_interpreter_does(program: str, expected: tuple[int, str, str]):
    (forked,) = run_ranks(program, 1, imported=("json",))
    assert forked[:3] == expected == run_ranks(program, 1)[0][:3]


def test_an_error_in_a_fork_shows_the_programs_frames_only():
    (forked,) = run_ranks("def f():\n    raise ValueError('mine')\nf()", 1, imported=("json",))
    assert forked.returncode == 1
    frames = [line for line in forked.stderr.splitlines() if 'File "' in line]
    assert len(frames) == 2
    assert all("program.py" in line for line in frames)
