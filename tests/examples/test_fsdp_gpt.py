"""The example of sharded training runs as it is, learns, and sends what its compressors say."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from launching import TORCHRUN, run_command

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "fsdp_gpt.py"


def run(*arguments: str) -> tuple[float, float, int]:
    """Bits a character, with quantised and with exact weights, and bytes a step."""
    command = [*TORCHRUN, sys.executable, str(SCRIPT), "--steps=25", "--blocks=1", *arguments]
    ended = run_command(command, timeout=120)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = re.search(r"([\d.]+) bits.*weights, ([\d.]+) with.*\n([\d,]+) bytes", ended.stdout)
    assert found is not None, ended.stdout
    return float(found[1]), float(found[2]), int(found[3].replace(",", ""))


@pytest.mark.full
def test_it_learns_at_a_quarter_of_the_bytes():
    quantised, exact, few = run()
    plain, same, many = run("--weights=none", "--gradients=none")
    assert plain == same < 5.0
    assert quantised == pytest.approx(plain, rel=0.02)
    assert exact == pytest.approx(plain, rel=0.02)
    assert 3.5 < many / few < 4.0
