"""What make gpu-carry puts into the source tree: the module of a wheel for any newer Python, and nothing older."""

from __future__ import annotations

import importlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

gpu_carry = importlib.import_module("gpu_carry")


def wheel(folder: Path, name: str) -> Path:
    path = folder / "gradcomp-0-cp312-abi3-linux_x86_64.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(name, b"code")
    return path


def test_the_module_takes_the_place_of_an_older_one(tmp_path):
    target = tmp_path / "_native.abi3.so"
    target.write_bytes(b"an older one, which was longer")
    gpu_carry.place(wheel(tmp_path, gpu_carry.MODULE), target)
    assert target.read_bytes() == b"code"
    assert target.stat().st_mode & 0o111
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".so", ".whl"]


def test_a_module_for_one_version_of_python_is_refused(tmp_path):
    target = tmp_path / "_native.abi3.so"
    with pytest.raises(SystemExit, match=r"has no gradcomp/_native\.abi3\.so"):
        gpu_carry.place(wheel(tmp_path, "gradcomp/_native.cpython-311-x86_64-linux-gnu.so"), target)
    assert not target.exists()


def test_the_oldest_glibc_is_the_newest_that_a_symbol_asks_for():
    assert gpu_carry.glibc(b"..GLIBC_2.9\0GLIBC_2.14\0GLIBCXX_3.4.30\0GLIBC_2.2.5..") == "2.14"


def test_git_ignores_what_is_carried_and_nothing_else_hides_it():
    paths = [gpu_carry.MODULE, f"{gpu_carry.CODE}/13.0/0.cubin"]
    done = subprocess.run(
        ["git", "check-ignore", "--no-index", *paths], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if "not a git repository" in done.stderr:
        pytest.skip("no clone")
    assert done.stdout.split() == paths
