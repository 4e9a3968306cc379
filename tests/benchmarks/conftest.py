"""The benchmarks are scripts beside each other; their tests import them and start them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))


@pytest.fixture
def run_script():
    """``run_script("benchmarks/step.py", ...)``: the finished process, its output as text."""

    def run(script: str, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        # A script imports its neighbours; the source tree itself is not on its path.
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
        command = [sys.executable, str(ROOT / script), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        if check:
            assert done.returncode == 0, done.stdout + done.stderr
        return done

    return run


@pytest.fixture
def run_json(run_script, tmp_path: Path):
    """``run_json("benchmarks/step.py", ...)``: what it writes as JSON."""

    def run(script: str, *arguments: str, check: bool = True) -> Any:
        path = tmp_path / "found.json"
        done = run_script(script, *arguments, f"--json={path}", check=check)
        assert path.exists(), done.stdout + done.stderr
        return json.loads(path.read_text())

    return run
