"""The mutation check can draw its changes: every folder that its table names exists."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "mutate.py"


def test_forty_different_changes_are_drawn() -> None:
    command = [sys.executable, str(SCRIPT), "--list", "--count=40", "--seed=1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr  # a folder that does not exist ends it
    assert len(set(done.stdout.splitlines())) == 40
