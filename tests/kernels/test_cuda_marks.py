"""`make test-gpu` on a machine whose GPU is pretended: which cases it runs, and that they take the device."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
#: The tests of all backends.
MODULES = ("backends", "draws", "driver", "hostile", "indices", "lowrank", "scatter", "selection")


def pytest_with_a_gpu(*arguments: str) -> list[str]:
    """What a run with the mark says."""
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "--full",
            *arguments,
            "-p",
            "kernels.pretended_gpu",
            "-m",
            "gpu",
            "-q",
        ],
        cwd=HERE.parents[1],
        env=os.environ | {"PYTHONSAFEPATH": "1", "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    return run.stdout.splitlines()


def test_without_the_compiled_module_all_cases_of_the_gpu_are_collected_and_no_others() -> None:
    lines = pytest_with_a_gpu("-p", "kernels.uncompiled", "--collect-only", str(HERE))
    cases = [line for line in lines if "::" in line]
    assert [case for case in cases if not re.search(r"\[(.*-)?gpu(-.*)?\]$", case)] == []
    found = {case.partition("::")[0].rpartition("/test_")[2] for case in cases}
    assert found == {f"{name}.py" for name in MODULES}


def test_marked_cases_take_the_device() -> None:
    lines = pytest_with_a_gpu(*(str(HERE / f"test_{name}.py") for name in ("driver", "draws", "hostile")))
    assert re.search(r"^\d+ passed, \d+ deselected", lines[-1])
