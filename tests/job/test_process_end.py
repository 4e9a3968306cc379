"""What counts as an exception that ends the process, in processes of their own."""

from __future__ import annotations

import subprocess
import sys

import pytest

BEGIN = """
import atexit, sys, threading
sys.excepthook = lambda kind, error, traceback: print("hook", kind.__name__)
from gradcomp.job import process_end
process_end.observe()
atexit.register(lambda: print("ended by", type(process_end.uncaught()).__name__))
"""


def said(program: str, *options: str, typed: str = "") -> list[str]:
    command = [sys.executable, *options, "-c", BEGIN + program]
    done = subprocess.run(command, check=False, input=typed, capture_output=True, text=True, timeout=60)
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        pytest.param("1 / 0", ["hook ZeroDivisionError", "ended by ZeroDivisionError"], id="raised"),
        pytest.param("raise KeyboardInterrupt", ["hook KeyboardInterrupt", "ended by KeyboardInterrupt"], id="^C"),
        pytest.param("sys.exit(3)", ["ended by NoneType"], id="exit"),
        pytest.param("t = threading.Thread(target=len); t.start(); t.join()", ["ended by NoneType"], id="thread"),
        pytest.param("sys.last_value = ValueError('of old')", ["ended by NoneType"], id="last_value"),
    ],
)  # fmt: skip
def test_only_an_exception_that_ends_the_program_counts_and_the_former_hook_is_called(program, expected):
    assert said(program) == expected


def test_an_error_at_a_prompt_does_not_count():
    assert said("", "-i", typed="1 / 0\n") == ["hook ZeroDivisionError", "ended by NoneType"]


def test_an_error_before_a_prompt_does_not_count():
    assert said("1 / 0", "-i") == ["hook ZeroDivisionError", "ended by NoneType"]


def test_the_hook_is_given_back():
    assert said("process_end.stop_observing(); 1 / 0") == ["hook ZeroDivisionError", "ended by NoneType"]


def test_a_hook_that_another_has_taken_is_left_alone():
    program = "ours = sys.excepthook; sys.excepthook = len; process_end.stop_observing(); print(sys.excepthook is len)"
    assert said(program)[0] == "True"
