"""The example of local steps runs as it is, learns, and sends once in many steps."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from launching import TORCHRUN, run_command

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "local_gpt.py"


def run(*arguments: str) -> tuple[float, int, int]:
    """Bits a character, bytes a step, and how many exchanges there were."""
    command = [*TORCHRUN, sys.executable, str(SCRIPT), "--steps=60", "--blocks=1", "--every=10", *arguments]
    ended = run_command(command, timeout=120)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = re.search(r"([\d.]+) bits a character\n([\d,]+) bytes.* in (\d+) exchanges", ended.stdout)
    assert found is not None, ended.stdout
    return float(found[1]), int(found[2].replace(",", "")), int(found[3])


@pytest.mark.full
def test_it_learns_from_one_exchange_in_ten_steps():
    sparse, few, rounds = run()
    dense, more, same = run("--method=diloco")
    every, most, steps = run("--method=every-step")
    assert (rounds, same, steps) == (6, 6, 60)
    assert every < 5.0
    assert dense < 5.0
    assert sparse < 5.5
    assert few < more / 90
    assert few < most / 100
