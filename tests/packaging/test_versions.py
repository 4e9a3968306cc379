"""scripts/versions.py and scripts/wheels.py: which wheel fits, what is missing is said, and nothing compiles."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
HERE = f"{sys.version_info.major}.{sys.version_info.minor}"


@pytest.fixture
def interpreters(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("interpreters")


@pytest.fixture
def versions(interpreters: ModuleType) -> ModuleType:
    return importlib.import_module("versions")


@pytest.fixture
def no_interpreter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))


def stand_in(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_an_interpreter_on_the_path(interpreters: ModuleType, no_interpreter: None, tmp_path: Path) -> None:
    stand_in(tmp_path / "python3.12", "echo CPython 3.12 /somewhere/python")
    assert interpreters.find("3.12") == Path("/somewhere/python")
    assert interpreters.find("3.13") is None


def test_a_name_without_an_interpreter_is_passed_over(
    interpreters: ModuleType, no_interpreter: None, tmp_path: Path
) -> None:
    stand_in(tmp_path / "python3.12", "exit 127")
    stand_in(tmp_path / "python3", "echo PyPy 3.12 /pypy")
    assert interpreters.find("3.12") is None
    stand_in(tmp_path / "versions" / "3.12.7" / "bin" / "python", "echo CPython 3.12 /from/pyenv")
    assert interpreters.find("3.12") == Path("/from/pyenv")


def test_rows_have_names_of_their_own_and_cover_what_is_promised(versions: ModuleType) -> None:
    names = [row.name for row in versions.ROWS]
    assert len(set(names)) == len(names)
    for framework, oldest in (("torch", "2.6"), ("tf", "2.16")):
        rows = [row for row in versions.ROWS if row.framework == framework]
        assert {row.python for row in rows} == {"3.11", "3.12", "3.13"}
        assert {row.version for row in rows} >= {oldest, ""}
    makefile = (ROOT / "Makefile").read_text()
    (chosen,) = [line for line in makefile.splitlines() if "--no-tests --only" in line]
    assert set(chosen.partition("--only ")[2].split()) <= set(names)
    tested = {path for framework in versions.FRAMEWORKS.values() for path in framework.tests}
    assert [path for path in tested if not (ROOT / path).exists()] == []


def test_a_missing_interpreter_is_a_line_of_the_table(
    versions: ModuleType, no_interpreter: None, tmp_path: Path
) -> None:
    result = versions.try_row(versions.Row("tf", "2.16", "3.12"), tmp_path, tmp_path / "env", tests=True)
    assert result.line() == "| `tf-2.16-py3.12` | not here: no CPython 3.12 on this machine |  |  |"
    assert not result.failed


def test_the_wheel_that_fits(versions: ModuleType, tmp_path: Path) -> None:
    tag = "cp312-abi3" if sys.version_info >= (3, 12) else "cp311-cp311"
    platform = f"manylinux_2_17_{os.uname().machine}"
    for each in ("cp310-cp310", "cp399-abi3", tag):
        (tmp_path / f"gradcomp-0.1.0-{each}-{platform}.whl").touch()
    assert versions._wheel(tmp_path, Path(sys.executable)).name == f"gradcomp-0.1.0-{tag}-{platform}.whl"


def test_no_wheel_that_fits_says_what_to_run(versions: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "gradcomp-0.1.0-cp310-cp310-linux_x86_64.whl").touch()
    with pytest.raises(versions._AbsentError, match="run make wheels"):
        versions._wheel(tmp_path, Path(sys.executable))


def test_an_environment_with_a_compiler_is_none(versions: ModuleType, tmp_path: Path) -> None:
    python = stand_in(tmp_path / "bin" / "python", "exit 0")
    assert versions._bare_environment(python)["PATH"] == str(tmp_path / "bin")
    stand_in(tmp_path / "bin" / "g++", "exit 0")
    with pytest.raises(SystemExit, match=r"g\+\+"):
        versions._bare_environment(python)
