"""A script in a clone's root imports its `gradcomp/`, which has no compiled module: it works, or says why not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import gradcomp
from gradcomp import _native
from gradcomp.kernels.dispatch import digest

ROOT = Path(__file__).resolve().parents[2]
SITE = Path(gradcomp.__file__).parents[1]

PROGRAM = """
import gradcomp, gradcomp.job.runtime as job
from gradcomp.core.config import Config
from gradcomp.kernels import dispatch
print(gradcomp.__file__)
job._choose_kernels(Config(log_level="warning"))
from gradcomp import _native
print(dispatch.backend(), _native.__file__)
"""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A source tree with a script in its root."""
    root = tmp_path / "clone"
    without = shutil.ignore_patterns("__pycache__", "cubins", "_native.*.so")
    for name in ("gradcomp", "native"):
        shutil.copytree(ROOT / name, root / name, ignore=without)
    shutil.copy(ROOT / "CMakeLists.txt", root)
    (root / "train.py").write_text(PROGRAM)
    return root


def start(clone: Path, *options: str, path: str = "") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": path}
    del environment["PYTHONSAFEPATH"]  # Python puts the script's folder first, as it does for users
    command = [sys.executable, *options, str(clone / "train.py")]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stderr.splitlines()[-1].removeprefix("gradcomp.core.errors.ConfigError: ")


def test_the_compiled_module_knows_its_sources() -> None:
    assert _native.sources_digest() == digest(ROOT)


def test_it_runs_with_the_installed_module_of_the_same_sources(clone: Path) -> None:
    done = start(clone)
    assert done.stdout.split() == [
        str(clone / "gradcomp" / "__init__.py"),
        "native",
        str(_native.__file__),
    ], done.stderr


def test_a_module_of_other_sources_is_refused_in_one_line(clone: Path) -> None:
    source = clone / "native" / "draw.cpp"
    source.write_text(source.read_text() + "// changed\n")
    said = last_line(start(clone))
    assert said.endswith(
        f"Python imports the source tree {clone} instead of the installed {SITE / 'gradcomp'}, "
        f"which was built from other C++ sources: run pip install {clone}, or start the script from another directory"
    )


def test_where_nothing_is_installed_it_says_so_in_one_line(clone: Path, tmp_path: Path) -> None:
    others = tmp_path / "others"
    others.mkdir()
    for each in SITE.iterdir():
        if each.name.startswith(("numpy", "ml_dtypes", "safetensors")):
            (others / each.name).symlink_to(each)
    said = last_line(start(clone, "-S", path=str(others)))
    assert said.endswith(
        f"Python imports the source tree {clone}, which has no compiled module, and no gradcomp is installed: "
        f"run pip install {clone}"
    )


def test_a_renamed_or_a_new_source_is_another_digest(clone: Path) -> None:
    before = digest(clone)
    (clone / "native" / "draw.cpp").rename(clone / "native" / "drew.cpp")
    renamed = digest(clone)
    (clone / "native" / "notes.txt").write_text("no source\n")
    assert digest(clone) == renamed != before
    (clone / "native" / "new.hpp").touch()
    assert digest(clone) not in (before, renamed)
