"""The script that users read first runs as it is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "digits.py"


def run(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.full
def test_a_plain_process_is_a_world_of_one(tmp_path):
    path = tmp_path / "result.json"
    run("--compression=quantize:bits=4", "--epochs=2", f"--json={path}")
    result = json.loads(path.read_text())
    assert result["bytes_per_step"] == 0
    assert result["accuracy"] > 0.5


@pytest.mark.full
def test_the_demo_compares_uncompressed_with_4_bits():
    lines = run("--demo", "--epochs=3").splitlines()
    rows = {line.split("  ")[0]: line.split()[-9:] for line in lines if "%" in line and "x" in line}
    assert set(rows) == {"uncompressed", "4 bits"}
    ratios = {title: float(cells[2].rstrip("x")) for title, cells in rows.items()}
    assert ratios["uncompressed"] == pytest.approx(1.0, abs=0.01)
    assert ratios["4 bits"] > 7
    slow = {title: float(cells[5]) for title, cells in rows.items()}
    assert slow["4 bits"] < slow["uncompressed"]  # with 1 Gbit/s, modelled
