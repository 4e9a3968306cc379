"""Finds CPython interpreters, and makes environments of them; a missing one is for the caller to report."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

_ASK = "import platform, sys; print(platform.python_implementation(), '%d.%d' % sys.version_info[:2], sys.executable)"


def _candidates(version: str) -> Iterator[str]:
    yield from filter(None, [shutil.which(f"python{version}"), shutil.which("python3")])
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    yield from (str(each / "bin" / "python") for each in sorted(root.glob(f"{version}.*")))


def find(version: str) -> Path | None:
    """A CPython of this version ("3.12") that starts: from PATH, or one that pyenv has installed."""
    for candidate in _candidates(version):
        try:
            done = subprocess.run([candidate, "-c", _ASK], capture_output=True, text=True, check=False)
        except OSError:
            continue
        if done.returncode == 0:  # pyenv's stand-ins fail for versions that are installed and not chosen
            implementation, found, path = done.stdout.split(maxsplit=2)
            if (implementation, found) == ("CPython", version):
                return Path(path.strip())
    return None


def environment(interpreter: Path, folder: Path, *requirements: str) -> Path:
    """The Python of an environment with these requirements, made if missing; CalledProcessError if pip cannot."""
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([str(interpreter), "-m", "venv", str(folder)], check=True)
    install(python, *requirements)
    return python


def install(python: Path, *arguments: str) -> None:
    """``pip install`` with these arguments; CalledProcessError with pip's words if it fails."""
    if arguments:
        command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments]
        subprocess.run(command, check=True, capture_output=True, text=True)
