"""A release's metadata have absolute links; the source has no address of its own."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ADDRESS = "https://host.example/owner/gradcomp"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """As much of one as the script reads."""
    for name in ("pyproject.toml", "README.md", "CONTRIBUTING.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    return tmp_path


def write_addresses(root: Path, repository: str = ADDRESS) -> subprocess.CompletedProcess[str]:
    script = ROOT / "scripts" / "release_metadata.py"
    command = [sys.executable, str(script), f"--repository={repository}", "--ref=v1.2.3", f"--root={root}"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def links(text: str) -> list[str]:
    return re.findall(r"\]\(([^)]+)\)", text)


def test_links_and_addresses_of_a_release(checkout: Path) -> None:
    before = links((checkout / "README.md").read_text())
    assert write_addresses(checkout).returncode == 0
    after = links((checkout / "README.md").read_text())
    relative = [link for link in before if not link.startswith("http")]
    assert {"docs/index.md", "docs/step-links.png"} <= set(relative)
    assert [link for link in after if not link.startswith("https://")] == []
    assert [link for link in after if link.startswith(ADDRESS)] == [
        f"{ADDRESS}/{'raw' if each.endswith('.png') else 'blob'}/v1.2.3/{each}" for each in relative
    ]
    project = tomllib.loads((checkout / "pyproject.toml").read_text())["project"]
    source = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project.pop("urls")["Repository"] == ADDRESS
    assert project == source


def test_a_link_to_nothing_is_an_error_and_nothing_is_written(checkout: Path) -> None:
    readme = checkout / "README.md"
    readme.write_text(readme.read_text() + "[gone](docs/gone.md#here)\n")
    before = [path.read_text() for path in (readme, checkout / "pyproject.toml")]
    done = write_addresses(checkout)
    assert done.returncode == 1
    assert done.stderr == "README.md links to files that are not there: docs/gone.md\n"
    assert [path.read_text() for path in (readme, checkout / "pyproject.toml")] == before


def test_once_is_enough(checkout: Path) -> None:
    assert write_addresses(checkout).returncode == 0
    assert write_addresses(checkout).stderr == "pyproject.toml has [project.urls] already\n"


@pytest.mark.parametrize("repository", ["http://host.example/a", "https://host.example/a/", "owner/gradcomp"])
def test_an_address_that_is_none(checkout: Path, repository: str) -> None:
    assert write_addresses(checkout, repository).returncode == 2
