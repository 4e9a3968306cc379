"""The tutorial's files run as they stand on its page, and its compressor keeps what the contract suite asks for."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import preloaded
import pytest
from launching import Finished, run_ranks, run_torchrun

from gradcomp.compress import registry
from gradcomp.core import plan as levels
from gradcomp.testing import CHECKS, Row

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "tutorials" / "own-compressor.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r'^```python title="(\w+\.py)"\n(.*?)^```', PAGE, re.MULTILINE | re.DOTALL))
OUTPUTS = re.findall(r"^```text\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)

ROW = re.compile(r"^(\S+) +loss (\S+) -> (\S+), +(\S+) bytes per step, equal: (\S+)$", re.MULTILINE)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a reader has saved the files."""
    found = tmp_path_factory.mktemp("tutorial")
    for name, text in FILES.items():
        (found / name).write_text(text, encoding="utf-8")
    return found


def beside(directory: Path) -> dict[str, str]:
    """Python finds a program's own directory by itself, but not with PYTHONSAFEPATH, which the tests set."""
    return {"PYTHONPATH": os.pathsep.join([str(directory), os.environ["PYTHONPATH"]])}


def test_the_page_has_its_files_and_the_compressor_at_most_60_lines():
    assert set(FILES) == {"three_lc.py", "check.py", "train.py"}
    assert sum(bool(line.strip()) for line in FILES["three_lc.py"].splitlines()) <= 60


def forked(source: str, world: int, *, env: dict[str, str]) -> list[Finished]:
    """As under torchrun, by ranks that start sooner: of a process that knows no directory of a reader's."""
    directory = env["PYTHONPATH"].split(os.pathsep)[0]
    source = f"import sys\nsys.path.insert(0, {directory!r})\n{source}"
    return run_ranks(source, world, imported=preloaded.TORCH)


@pytest.mark.parametrize("launch", [forked, pytest.param(run_torchrun, marks=pytest.mark.full)])
def test_ranks_train_as_the_page_says(directory: Path, launch):
    """Equal parameters on both ranks; a loss that falls with the compressor as without it; the bytes of the page."""
    finished = launch(FILES["train.py"], 2, env=beside(directory))
    assert not any(end.returncode for end in finished), finished[0].stderr
    rows, shown = ROW.findall(finished[0].stdout), ROW.findall(OUTPUTS[1])
    assert [row[0] for row in rows] == ["none", "ThreeLC(sparsity=1.0)", "three_lc:sparsity=1.5"]
    assert [(row[0], row[3], row[4]) for row in rows] == [(row[0], row[3], row[4]) for row in shown]
    for _, before, after, _, equal in rows:
        assert equal == "True"
        assert float(after) < float(before) / 10
    exact, *compressed = (int(row[3].replace(",", "")) for row in rows)
    assert all(f"| together | {sent:,} |" in PAGE and sent < exact / 15 for sent in compressed)


def test_the_check_passes_and_prints_what_the_page_shows(directory: Path):
    done = subprocess.run(
        [sys.executable, "check.py"],
        cwd=directory,
        env={**os.environ, **beside(directory)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == OUTPUTS[0]


# --- the contract suite -------------------------------------------------------------------------------------


def load(file: Path) -> ModuleType:
    """A module by its file, under no name that another module could import."""
    spec = importlib.util.spec_from_file_location(f"tutorial_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def compressor(directory: Path) -> Iterator[type]:
    """The tutorial's class, registered as long as this file runs: other tests count what is registered."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "REGISTERED", dict(registry.REGISTERED))
        patch.setattr(levels, "LEVELS", dict(levels.LEVELS))
        yield load(directory / "three_lc.py").ThreeLC
    registry.registered.cache_clear()


@pytest.mark.parametrize("sparsity", [1.0, 1.5])
@pytest.mark.parametrize("check", CHECKS)
def test_the_compressor_keeps_the_contract(compressor, check: str, sparsity: float):
    # With a sparsity above 1 the largest value is not sent as it is.
    CHECKS[check](Row(compressor(sparsity), constants=sparsity == 1.0))


@pytest.mark.parametrize("sparsity", [0.5, 2, "much", True, float("nan")])
def test_a_sparsity_that_cannot_be_is_refused(compressor, sparsity):
    from gradcomp import ConfigError

    with pytest.raises(ConfigError, match=r"\[1, 2\)"):
        compressor(sparsity)
