"""What scripts/install_horovod.sh says where it cannot build. The build itself: make horovod."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts/install_horovod.sh"


def install(*arguments: str) -> tuple[int, str]:
    done = subprocess.run([SCRIPT, *arguments], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def pretender(directory: Path, lacks: str) -> str:
    """An interpreter without one thing."""
    path = directory / "python"
    path.write_text(f'#!/bin/sh\ncase "$*" in *"{lacks}"*) exit 1 ;; esac\nexec "{sys.executable}" "$@"\n')
    path.chmod(0o755)
    return str(path)


def test_help_is_the_usage() -> None:
    code, said = install("--help")
    assert (code, said.count("scripts/install_horovod.sh [--mpi] [PYTHON]")) == (0, 1)
    assert "set -euo" not in said


@pytest.mark.parametrize("argument", ["--gloo", "/nowhere/python"])
def test_an_argument_that_is_none_is_named(argument: str) -> None:
    code, said = install(argument)
    assert (code, argument in said) == (1, True)


@pytest.mark.parametrize(
    ("lacks", "named"), [("version_info", "3.11"), ("-m pip", "no pip"), ("import torch", "no torch")]
)
def test_what_is_missing_is_named(lacks: str, named: str, tmp_path: Path) -> None:
    code, said = install(pretender(tmp_path, lacks))
    assert (code, named in said) == (1, True), said
