"""What pyproject.toml promises: extras, versions, and what the hosted CI builds."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
EXTRAS = PROJECT["optional-dependencies"]

#: Where users read the name of an extra: "gradcomp[name]", or ".[name]" in a clone.
NAMED = re.compile(r"(?:gradcomp|\.)\[([a-z][a-z0-9,-]*)\](?!\()")
TEXTS = [
    *(ROOT / "gradcomp").rglob("*.py"),
    *(ROOT / "docs").rglob("*.md"),
    *(ROOT / "README.md", ROOT / "Makefile", ROOT / "scripts" / "versions.py"),
]


def expanded(extra: str) -> set[str]:
    """Requirements of an extra, those of the extras that it names included."""
    found: set[str] = set()
    for requirement in EXTRAS[extra]:
        own = re.fullmatch(r"gradcomp\[([^\]]+)\]", requirement)
        found |= set().union(*map(expanded, own[1].split(","))) if own else {requirement}
    return found


def names(extra: str) -> set[str]:
    return {re.match(r"[\w-]+", requirement)[0] for requirement in expanded(extra)}


def test_every_extra_that_a_text_names_exists() -> None:
    named = {
        extra
        for path in TEXTS
        for pip in re.findall(r"pip install[^\n]*", path.read_text())
        for extras in NAMED.findall(pip)
        for extra in extras.split(",")
    }
    assert named <= EXTRAS.keys()
    assert {"torch", "tf", "tf-cpu", "mpi", "cuda12", "cuda13"} <= named


def test_no_extra_but_the_one_for_cpus_chooses_a_build_of_tensorflow() -> None:
    choosing = {extra for extra in EXTRAS if any(name.startswith("tensorflow") for name in names(extra))}
    assert choosing == {"tf-cpu", "test"}
    assert names("tf") == {"mpi4py", "mpich"}


@pytest.mark.parametrize("cuda", ["12", "13"])
def test_an_extra_for_each_cuda(cuda: str) -> None:
    assert names(f"cuda{cuda}") == {f"cupy-cuda{cuda}x"}
    assert names(f"nccl{cuda}") == {f"cupy-cuda{cuda}x", f"nvidia-nccl-cu{cuda}"}


def test_wheels_are_built_for_every_python_that_is_named() -> None:
    prefix = "Programming Language :: Python :: 3."
    minors = [each.removeprefix(prefix) for each in PROJECT["classifiers"] if each.startswith(prefix)]
    assert PYPROJECT["tool"]["cibuildwheel"]["build"] == [f"cp3{minor}-*" for minor in minors]
    assert PROJECT["requires-python"] == f">=3.{minors[0]}"
    assert PYPROJECT["tool"]["scikit-build"]["wheel"]["py-api"] == "cp312"


def test_the_hosted_ci_tests_what_is_there() -> None:
    command = PYPROJECT["tool"]["cibuildwheel"]["test-command"]
    tested = re.findall(r"\{project\}/(\S+)", command)
    assert tested
    assert [each for each in tested if not (ROOT / each).exists()] == []
